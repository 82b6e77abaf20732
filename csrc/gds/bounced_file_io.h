// File I/O for memory that another I/O object, the inner I/O, cannot reach. The inner I/O uses a buffer in
// plain memory, and the device copies the bytes between that buffer and the call's memory.
#pragma once
#include <memory>

#include "gds/file_io.h"
#include "gds/transform/device.h"

namespace flexkv {

class BouncedFileIo : public FileIo {
 public:
  // `reason`: why no direct I/O is used; empty if that is not known. direct_refusal() includes this text.
  BouncedFileIo(std::shared_ptr<FileIo> inner, std::shared_ptr<TransformDevice> device,
                std::string reason = {})
      : inner_(std::move(inner)), device_(std::move(device)), reason_(std::move(reason)) {}
  std::string name() const override { return inner_->name() + " and a copy"; }
  IoOutcome transfer(const IoCall& call) override;
  IoRoute route(const IoCall&) const override { return IoRoute::kBounced; }
  std::string direct_refusal() const override { return reason_.empty() ? name() : name() + ": " + reason_; }
  Registering registering() const override { return {true, false, direct_refusal(), {}}; }
  std::string add_memory(void*, int64_t) override { return {}; }
  void remove_memory(void*) override {}

 private:
  std::shared_ptr<FileIo> inner_;
  std::shared_ptr<TransformDevice> device_;
  std::string reason_;
};

}  // namespace flexkv
