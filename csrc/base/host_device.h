// FLEXKV_HD marks functions that both g++ and nvcc compile, so that a kernel and the host run the same
// arithmetic.
#pragma once

#if defined(__CUDACC__)
#define FLEXKV_HD __host__ __device__
#else
#define FLEXKV_HD
#endif
