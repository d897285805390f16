// No operator has a backward, and none is missed in silence: a call that would need one is an error, in eager mode and
// while torch.compile or torch.export trace it.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "checks.h"

namespace cpu_moe::ops {
namespace {

void check_argument(const c10::IValue& value, const std::string& name) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) check_no_grad(value.toTensor(), name);
  } else if (value.isTensorList()) {
    const auto list = value.toTensorVector();
    for (size_t i = 0; i < list.size(); ++i) check_no_grad(list[i], name + "[" + std::to_string(i) + "]");
  }
}

void no_backward(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const auto values = torch::jit::last(*stack, arguments.size());
  for (size_t i = 0; i < arguments.size(); ++i) check_argument(values[i], arguments[i].name());
  const at::AutoDispatchBelowADInplaceOrView below;
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

}  // namespace
}  // namespace cpu_moe::ops

TORCH_LIBRARY_IMPL(cpu_moe, Autograd, m) {
  for (const char* name : {"experts", "experts_out", "dequantize", "quantize", "stream_read"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&cpu_moe::ops::no_backward>());
  }
}
