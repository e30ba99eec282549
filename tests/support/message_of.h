// The text of the error that a call ends in, for tests of what is refused.
#pragma once

#include <exception>
#include <functional>
#include <string>

namespace flashport_test {

template <class E>
std::string message_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("an error of another class: ") + error.what();
  }
  return "no error";
}

}  // namespace flashport_test
