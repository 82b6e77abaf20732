// FLEXKV_EXPORT marks the functions that other shared libraries may call. All other symbols of the native
// core are hidden.
#pragma once

#define FLEXKV_EXPORT __attribute__((visibility("default")))
