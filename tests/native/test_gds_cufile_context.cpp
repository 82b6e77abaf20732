// Tests in which CUDA context flexkv opens cuFile's driver, with a fake GPU and a fake libcufile.
#include "cuda/device.h"
#include "fake_cuda.h"
#include "fake_cufile.h"
#include "gds/io_choice.h"

using namespace flexkv;

TEST_CASE("cufile context: what a machine promises is asked with the device current, beside a capture too") {
  reset_fake();
  fake_cuda::reset({.devices = 2});
  const auto loaded = cuda::find_functions(fake_cuda::finder());
  const auto gpu = cuda::Device::open(1, loaded.driver);
  struct Seen {
    int device = -2, mode = -2;
  };
  static Seen opened;
  CufileTable table = fake_table();
  table.driver_open = [] {
    opened = {fake_cuda::current_device(), fake_cuda::capture_mode()};
    return CufileError{};
  };
  std::optional<CufileUsers> users(std::in_place);
  const auto open = [&](std::string*) { return users->join([&] { return std::optional(table); }); };
  CHECK(gpudirect_refusal_on(*gpu, open).empty());
  CHECK(opened.device == 1);
  CHECK(opened.mode == cuda::kCaptureRelaxed);
  CHECK(fake_cuda::current_device() == -1);  // unchanged
  CHECK(fake_cuda::capture_mode() == cuda::kCaptureGlobal);
  users.emplace();
  static_cast<void>(open(nullptr));  // control: without a device, no context is current during the open
  CHECK(opened.device == -1);

  fake.status_flags = 0;
  users.emplace();
  CHECK(gpudirect_refusal_on(*gpu, open) == kCufileCompat);
  CHECK(gpudirect_refusal_on(*gpu, [](std::string* why) {
          *why = "none";
          return std::shared_ptr<Cufile>();
        }) == "none");
}
