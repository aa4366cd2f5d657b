// Operators on tensors of the device. Nearly all are those of the CPU, called on a view of the same
// memory; the memory that they read and write is noted with the current stream.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_scaled_dot_product_attention_math.h>
#include <torch/library.h>

#include <functional>
#include <unordered_set>

#include "device.h"

namespace fake_cuda {

using at::Tensor;
using c10::IValue;
using torch::jit::Stack;
using Tape = std::vector<std::function<void()>>;

inline Tape* tape = nullptr;  // of the graph that is being captured

inline void remember(std::function<void()> work) {
  if (capturing()) tape->push_back(std::move(work));
}

inline bool on_device(const Tensor& x) { return x.defined() && x.is_cuda(); }

inline c10::Storage make_storage(c10::DataPtr memory, size_t bytes, at::Allocator* allocator) {
  const auto by_bytes = c10::StorageImpl::use_byte_size_t();
  return c10::make_intrusive<c10::StorageImpl>(by_bytes, bytes, std::move(memory), allocator, true);
}

// Returns a tensor with the shape of `like` in this storage, of the device or of the host.
inline Tensor make_tensor(c10::Storage storage, const Tensor& like, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key),
                                                       like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(),
                                                    like.storage_offset());
  return made;
}

// Returns a tensor of the host in the memory of a tensor of the device, which it keeps alive.
inline Tensor host_view(const Tensor& x) {
  if (!on_device(x)) return x;
  auto* kept = new c10::Storage(x.storage());
  auto release = [](void* kept) { delete static_cast<c10::Storage*>(kept); };
  c10::DataPtr memory(kept->mutable_data(), kept, release, Device(DeviceType::CPU));
  auto storage =
      make_storage(std::move(memory), kept->nbytes(), c10::GetAllocator(DeviceType::CPU));
  auto view = make_tensor(std::move(storage), x, c10::DispatchKey::CPU);
  if (x.is_conj()) view._set_conj(true);
  if (x.is_neg()) view._set_neg(true);
  return view;
}

// Returns a new tensor of the device with the numbers of one of the host. Its allocation counts as
// a write of the current stream, for which the allocator may have taken the memory from older work.
inline Tensor to_device(const Tensor& x, bool filled) {
  const size_t bytes = x.storage().nbytes();
  auto memory = device_memory.allocate(bytes);
  if (bytes && filled) std::memcpy(memory.get(), x.storage().data(), bytes);
  return make_tensor(make_storage(std::move(memory), bytes, &device_memory), x,
                     c10::DispatchKey::CUDA);
}

inline Span span_of(const Tensor& x) {
  if (!x.defined() || !x.has_storage() || !x.numel()) return {nullptr, nullptr};
  int64_t extent = 1;
  for (int64_t i = 0; i < x.dim(); ++i) extent += (x.size(i) - 1) * x.stride(i);
  auto* begin = static_cast<char*>(const_cast<void*>(x.const_data_ptr()));
  return {begin, begin + extent * x.element_size()};
}

template <typename Visit>
void each_tensor(const IValue& value, const Visit& visit) {
  if (value.isTensor()) visit(value.toTensor());
  if (value.isTensorList())
    for (const Tensor& x : value.toTensorList()) visit(x);
}

inline void call_on_host(const c10::OperatorHandle& operation, Stack& stack) {
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  operation.callBoxed(&stack);
}

// Operators with a result whose size or value the host must know.
inline const std::unordered_set<std::string> kWaiting = {
    "aten::_local_scalar_dense", "aten::nonzero",  "aten::equal",
    "aten::masked_select",       "aten::_unique2", "aten::unique_consecutive",
    "aten::unique_dim",          "aten::bincount", "aten::repeat_interleave"};

// One call of an operator.
class Call {
 public:
  Call(const c10::OperatorHandle& operation, Stack* stack)
      : operation_(operation), name_(operation.schema().name()), stack_(stack) {}

  void run() {
    take_arguments();
    if (waits()) {
      Locked lock;
      report("wait", "the host waits for " + name_);
      state.host_time = std::max(state.host_time, state.times[current_stream]);
      host_waits(name_, state.streams[current_stream]);
    }
    note_accesses();
    results_ = arguments_;
    call_on_host(operation_, results_);
    for (const auto& [view, x] : views_) follow_resize(view, x);
    remember_call();  // before the results are moved to the device
    return_results();
  }

 private:
  using Pair = std::pair<Tensor, Tensor>;  // host view, tensor of the device

  void take_arguments() {
    const auto& expected = operation_.schema().arguments();
    const size_t first = stack_->size() - expected.size();
    for (size_t i = 0; i < expected.size(); ++i) {
      const auto* alias = expected[i].alias_info();
      reads_ = !alias, writes_ = alias && alias->isWrite();
      arguments_.push_back(to_host((*stack_)[first + i]));
      if (expected[i].name() == "pin_memory" && !arguments_.back().isNone())
        arguments_.back() = false;
    }
    torch::jit::drop(*stack_, expected.size());
  }

  IValue to_host(const IValue& value) {
    if (value.isTensor()) return view(value.toTensor());
    if (value.isDevice()) {
      to_cpu_ = value.toDevice().is_cpu();
      return Device(DeviceType::CPU);
    }
    if (value.isTensorList()) {
      c10::List<Tensor> found;
      for (const Tensor& x : value.toTensorList()) found.push_back(view(x));
      return found;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> found;
      for (const std::optional<Tensor>& x : value.toOptionalTensorList())
        found.push_back(x ? std::optional<Tensor>(view(*x)) : std::nullopt);
      return found;
    }
    return value;
  }

  Tensor view(const Tensor& x) {
    if (!x.defined()) return x;
    const bool indexes = name_.find("index") != std::string::npos;
    if (!x.is_cuda()) {
      TORCH_CHECK(!x.dim() || !x.numel() || indexes,
                  "Expected all tensors to be on the same device, but found cpu and cuda in ",
                  name_);
      waits_ |= x.dim() > 0 && x.numel() > 0;  // an index on the host is copied
      return x;
    }
    TORCH_CHECK(views_.empty() || views_[0].second.device() == x.device(),
                "Expected all tensors to be on the same device, but found ",
                views_[0].second.device(), " and ", x.device(), " in ", name_);
    waits_ |= name_ == "aten::index" && !views_.empty() && x.scalar_type() == at::kBool;  // a mask
    views_.emplace_back(host_view(x), x);
    if (reads_ || writes_) used_.emplace_back(span_of(views_.back().first), writes_);
    return views_.back().first;
  }

  bool waits() const {
    const bool size_given = name_ == "aten::repeat_interleave" && !arguments_.back().isNone();
    return waits_ || (!views_.empty() && kWaiting.count(name_) && !size_given);
  }

  void note_accesses() {
    Locked lock;
    state.work = name_;
    tick(current_stream);
    for (const auto& [span, write] : used_) touch(span, current_stream, write);
  }

  // An `out` may get another size, and then other memory.
  void follow_resize(const Tensor& view, const Tensor& x) {
    if (view.sizes() == x.sizes()) return;
    auto* changed = x.unsafeGetTensorImpl();
    if (view.storage().data() != x.storage().data())
      changed->set_storage_keep_dtype(to_device(view, true).storage());
    changed->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
  }

  // Returns the tensor of the device whose memory this result has, if there is one.
  const Pair* origin(const Tensor& result) const {
    for (const auto& pair : views_)
      if (result.unsafeGetTensorImpl() == pair.first.unsafeGetTensorImpl()) return &pair;
    for (const auto& pair : views_)
      if (result.has_storage() && result.storage().nbytes() &&
          result.storage().data() == pair.first.storage().data())
        return &pair;
    return nullptr;
  }

  Tensor from_host(const Tensor& result) {
    if (!result.defined() || to_cpu_ || !result.is_cpu()) return result;
    if (const Pair* found = origin(result)) {
      const bool same = result.unsafeGetTensorImpl() == found->first.unsafeGetTensorImpl();
      return same ? found->second
                  : make_tensor(found->second.storage(), result, c10::DispatchKey::CUDA);
    }
    const Tensor made = to_device(result, !empty());
    Locked lock;
    touch(span_of(host_view(made)), current_stream, true);
    made_->push_back(host_view(made));
    return made;
  }

  bool empty() const { return name_.rfind("aten::empty", 0) == 0; }

  void return_results() {
    for (const IValue& value : results_) {
      if (value.isTensor()) {
        stack_->push_back(from_host(value.toTensor()));
      } else if (value.isTensorList()) {
        c10::List<Tensor> found;
        for (const Tensor& x : value.toTensorList()) found.push_back(from_host(x));
        stack_->push_back(found);
      } else {
        stack_->push_back(value);
      }
    }
  }

  // In a graph: call it again with the same arguments, and copy what it makes to where it was.
  void remember_call() {
    if (empty()) return;
    std::vector<bool> is_new;
    for (const IValue& value : results_)
      each_tensor(value, [&](const Tensor& x) {
        is_new.push_back(x.defined() && x.is_cpu() && !to_cpu_ && !origin(x));
      });
    remember([operation = operation_, arguments = arguments_, is_new, made = made_] {
      Stack again(arguments);
      call_on_host(operation, again);
      size_t i = 0, next = 0;
      for (const IValue& value : again)
        each_tensor(value, [&](const Tensor& x) {
          if (is_new[i++]) (*made)[next++].copy_(x);
        });
    });
  }

  const c10::OperatorHandle operation_;
  const std::string name_;
  Stack* const stack_;
  Stack arguments_, results_;
  std::vector<Pair> views_;
  std::vector<std::pair<Span, bool>> used_;
  std::shared_ptr<std::vector<Tensor>> made_ = std::make_shared<std::vector<Tensor>>();
  bool reads_ = true, writes_ = false, to_cpu_ = false, waits_ = false;
};

inline void call(const c10::OperatorHandle& operation, Stack* stack) {
  Call(operation, stack).run();
}

// -------------------------------------------------------------------------------------- copies

// Copies between host and device. The host waits for a copy from or to memory that is not pinned,
// and for one that torch makes through a copy of another type or shape.
inline void copy_across(const Tensor& into, const Tensor& from, bool incoming, bool non_blocking) {
  const Tensor& host = incoming ? from : into;
  const Span span = span_of(host);
  const bool direct = non_blocking && is_pinned(host.const_data_ptr()) && host.is_contiguous() &&
                      into.scalar_type() == from.scalar_type();
  Locked lock;
  remove_transfers(span, incoming);  // in order with this one, as the accesses have shown
  host_view(into).copy_(host_view(from));
  if (direct) {
    start_transfer(span, !incoming);
    return;
  }
  report("wait", incoming ? "the host waits for a copy to the device"
                          : "the host waits for a copy to the host");
  host_waits("a copy", state.streams[current_stream]);
}

inline Tensor& copy(Tensor& into, const Tensor& from, bool non_blocking) {
  if (into.is_same(from) || !into.numel()) return into;
  c10::impl::ExcludeDispatchKeyGuard no_autograd(c10::autograd_dispatch_keyset);
  const Tensor target = host_view(into), source = host_view(from);
  {
    Locked lock;
    state.work = "aten::copy_";
    tick(current_stream);
    for (const auto& [x, write] : {std::pair(source, false), std::pair(target, true)})
      if (find_block(x.const_data_ptr())) touch(span_of(x), current_stream, write);
  }
  if (on_device(into) && on_device(from))
    target.copy_(source);
  else
    copy_across(into, from, on_device(into), non_blocking);
  remember([target, source] { target.copy_(source); });
  return into;
}

// --------------------------------------------------------- operators that change storage or stream

inline const Tensor& resize(const Tensor& x, at::IntArrayRef sizes,
                            std::optional<at::MemoryFormat>) {
  const size_t bytes = (c10::multiply_integers(sizes) + x.storage_offset()) * x.element_size();
  auto storage = x.storage();
  if (bytes > storage.nbytes()) {
    auto memory = device_memory.allocate(bytes);
    if (storage.nbytes()) std::memcpy(memory.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(memory));
    storage.set_nbytes(bytes);
  }
  x.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return x;
}

inline Tensor& set_storage(Tensor& x, at::Storage storage, c10::SymInt offset,
                           c10::SymIntArrayRef sizes, c10::SymIntArrayRef strides) {
  auto* changed = x.unsafeGetTensorImpl();
  changed->set_storage_keep_dtype(storage);
  changed->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                 offset.expect_int());
  return x;
}

inline void record_stream(Tensor& x, c10::Stream stream) {
  if (x.has_storage()) record_memory(x.storage().data(), static_cast<int>(stream.id()));
}

// The CPU's own choice among the kernels of attention does not know tensors of another device.
inline Tensor attention(const Tensor& q, const Tensor& k, const Tensor& v,
                        const std::optional<Tensor>& mask, double dropout, bool causal,
                        std::optional<double> scale, bool grouped) {
  return std::get<0>(at::_scaled_dot_product_attention_math(q, k, v, mask, dropout, causal,
                                                            std::nullopt, scale, grouped));
}

}  // namespace fake_cuda

TORCH_LIBRARY(fake_cuda, library) {
  library.def(
      "host(Tensor x) -> Tensor",
      torch::dispatch(c10::DispatchKey::CompositeExplicitAutograd, TORCH_FN(fake_cuda::host_view)));
}
TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&fake_cuda::call>());
}
TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("copy_", TORCH_FN(fake_cuda::copy));
  library.impl("resize_", TORCH_FN(fake_cuda::resize));
  library.impl("set_.source_Storage_storage_offset", TORCH_FN(fake_cuda::set_storage));
  library.impl("record_stream", TORCH_FN(fake_cuda::record_stream));
}
TORCH_LIBRARY_IMPL(aten, AutogradCUDA, library) {
  library.impl("scaled_dot_product_attention", TORCH_FN(fake_cuda::attention));
}
