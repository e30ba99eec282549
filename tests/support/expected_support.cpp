#include "tests/support/expected_support.h"

#include <sstream>
#include <vector>

#include "tests/support/device.h"
#include "tests/support/embedded.h"

namespace flashport_test {
namespace {

struct Line {
  std::string pattern, reason;
};

int g_skipped = 0;

const std::vector<Line>& lines() {
  static const std::vector<Line> parsed = [] {
    std::vector<Line> found;
    std::istringstream text(expected_support(query_target()));
    for (std::string line; std::getline(text, line);) {
      if (line.empty() || line[0] == '#') continue;
      const std::size_t space = line.find(' ');
      const std::size_t reason = line.find_first_not_of(' ', space);
      found.push_back({line.substr(0, space), reason == std::string::npos ? "" : line.substr(reason)});
    }
    return found;
  }();
  return parsed;
}

}  // namespace

bool matches(const std::string& pattern, const std::string& text) {
  std::size_t p = 0, t = 0, star = std::string::npos, resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') ++p;
  return p == pattern.size();
}

std::string verdict(const std::string& case_name, bool supported, const std::string& reason) {
  bool listed = false, agreed = false;
  for (const Line& line : lines()) {
    if (!matches(line.pattern, case_name)) continue;
    listed = true;
    agreed = agreed || reason.find(line.reason) != std::string::npos;
  }
  const std::string file = "ci/expected_support/" + query_target() + ".txt";
  if (supported) return listed ? case_name + " runs, but " + file + " says that it cannot: remove its line" : "";
  if (!listed)
    return "lost coverage: " + case_name + " is not supported (" + reason + ") and " + file + " has no line for it";
  if (!agreed) return case_name + " is declined for another reason than " + file + " gives: " + reason;
  ++g_skipped;
  return "skip: " + reason;
}

std::string skip_summary() { return std::to_string(g_skipped) + " cases declined as expected_support says"; }

}  // namespace flashport_test
