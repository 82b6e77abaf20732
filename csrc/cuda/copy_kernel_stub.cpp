#include "cuda/copy_job.h"

namespace flexkv::cuda {

KernelLauncher copy_kernel_launcher() { return nullptr; }

}  // namespace flexkv::cuda
