// FLEXKV_EXPORT marks functions that other shared libraries may call; all other symbols of the core are
// hidden.
#pragma once

#define FLEXKV_EXPORT __attribute__((visibility("default")))
