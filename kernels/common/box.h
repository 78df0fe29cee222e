// From a C++ function to the boxed form that torch::stable registers.
//
// TORCH_BOX copies every argument and result handle several times, which costs about as much as
// half an allocation; here arguments are passed by reference and results handed over as they are.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

namespace ixt {

// An argument from the stack.
template <typename T>
T take(StableIValue value) {
  return torch::stable::detail::to<T>(value);
}

// As torch 2.11's own conversion, which leaks a string each time.
template <>
inline std::string take<std::string>(StableIValue value) {
  const auto handle = torch::stable::detail::to<StringHandle>(value);
  size_t length = 0;
  const char* text = nullptr;
  TORCH_ERROR_CODE_CHECK(torch_string_length(handle, &length));
  TORCH_ERROR_CODE_CHECK(torch_string_c_str(handle, &text));
  std::string copy(text, length);
  TORCH_ERROR_CODE_CHECK(torch_delete_string(handle));
  return copy;
}

// A tensor that an op made, until it returns it.
class Output {
 public:
  explicit Output(AtenTensorHandle handle) : handle_(handle) {}

  template <typename T = void>
  T* data() const {
    void* p = nullptr;
    TORCH_ERROR_CODE_CHECK(torch_get_mutable_data_ptr(handle_.get(), &p));
    return static_cast<T*>(p);
  }

  StableIValue release() { return torch::stable::detail::from(handle_.release()); }
  torch::stable::Tensor tensor() { return torch::stable::Tensor(handle_.release()); }

 private:
  struct Delete {
    void operator()(AtenTensorHandle handle) const { aoti_torch_delete_tensor_object(handle); }
  };
  std::unique_ptr<AtenTensorOpaque, Delete> handle_;
};

template <auto Function>
struct Boxed;

template <typename Result, typename... Args, Result (*Function)(Args...)>
struct Boxed<Function> {
  static void call(StableIValue* stack, uint64_t, uint64_t) {
    run(stack, std::index_sequence_for<Args...>{});
  }

 private:
  template <std::size_t... I>
  static void run(StableIValue* stack, std::index_sequence<I...>) {
    // Takes over every argument before anything can throw; braces keep the order.
    const std::tuple<std::decay_t<Args>...> args{
        take<std::decay_t<Args>>(stack[I])...};
    store(stack, Function(std::get<I>(args)...));
  }

  static void store(StableIValue* stack, Output&& result) { stack[0] = result.release(); }

  static void store(StableIValue* stack, std::vector<torch::stable::Tensor>&& results) {
    stack[0] = torch::stable::detail::from(results);
  }

  template <typename... Outputs>
  static void store(StableIValue* stack, std::tuple<Outputs...>&& results) {
    std::apply([&](auto&... result) { ((*stack++ = result.release()), ...); }, results);
  }
};

}  // namespace ixt
