// Marks what other shared libraries may call; everything else in the core is hidden.
#pragma once

#define FLEXKV_EXPORT __attribute__((visibility("default")))
