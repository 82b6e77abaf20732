// Marks what other shared libraries may call: everything else of the core is hidden.
#pragma once

#define FLEXKV_EXPORT __attribute__((visibility("default")))
