#include "tests/ops/decode/cases.h"

#include <map>
#include <ostream>
#include <sstream>

#include "tests/support/device.h"
#include "tests/support/embedded.h"
#include "tests/support/tensor.h"

namespace flashport_test {
namespace {

std::vector<std::string> split(const std::string& text, char separator) {
  std::vector<std::string> parts;
  std::istringstream in(text);
  for (std::string part; std::getline(in, part, separator);) parts.push_back(part);
  return parts;
}

// "131072|200*63"
std::vector<std::int64_t> lengths(const std::string& text) {
  std::vector<std::int64_t> all;
  for (const std::string& part : split(text, '|')) {
    const std::size_t star = part.find('*');
    const std::int64_t count = star == std::string::npos ? 1 : std::stoll(part.substr(star + 1));
    all.insert(all.end(), count, std::stoll(part.substr(0, star)));
  }
  return all;
}

DecodeCase parse(std::map<std::string, std::string>& row) {
  DecodeCase c;
  c.name = row["name"];
  c.tier = row["tier"];
  c.q = type_named(row["q"]);
  c.k_format = type_named(row["k_format"]);
  c.v_format = type_named(row["v_format"]);
  c.dk = std::stoll(row["dk"]);
  c.dv = std::stoll(row["dv"]);
  c.hq = std::stoll(row["hq"]);
  c.hkv = std::stoll(row["hkv"]);
  c.q_len = std::stoll(row["q_len"]);
  c.q_form = row["q_form"];
  c.layout = row["layout"];
  c.page = std::stoll(row["page"]);
  c.lens = lengths(row["lens"]);
  const std::vector<std::string> window = split(row["window"], ':');
  c.window_left = std::stoll(window.at(0));
  c.window_right = std::stoll(window.at(1));
  c.softcap = std::stod(row["softcap"]);
  c.alibi = row["alibi"];
  c.sinks = row["sinks"] == "1";
  c.tree = row["tree"] == "1";
  c.scales = row["scales"];
  c.index64 = row["index"] == "i64";
  c.out_fp32 = row["out"] == "fp32";
  c.lse = row["lse"] == "1";
  c.strides = row["strides"];
  c.splits = std::stoi(row["splits"]);
  return c;
}

}  // namespace

flashport::DecodeQuery DecodeCase::query() const {
  return {query_target(), dtype_of(q), format_of(k_format), format_of(v_format), dk, dv, hq / hkv, q_len};
}

std::ostream& operator<<(std::ostream& out, const DecodeCase& c) { return out << c.name; }

std::vector<DecodeCase> decode_cases(const std::string& tier) {
  std::vector<DecodeCase> found;
  std::istringstream text(decode_cases_csv());
  std::string line;
  std::getline(text, line);
  const std::vector<std::string> columns = split(line, ',');
  while (std::getline(text, line)) {
    const std::vector<std::string> fields = split(line, ',');
    std::map<std::string, std::string> row;
    for (std::size_t i = 0; i < columns.size(); ++i) row[columns[i]] = fields.at(i);
    if (row["tier"] == tier) found.push_back(parse(row));
  }
  return found;
}

std::vector<DecodeCase> chosen_decode_cases() {
  std::vector<DecodeCase> cases = decode_cases("emulator");
  if (options().emulator) return cases;
  for (DecodeCase& c : decode_cases("full")) cases.push_back(std::move(c));
  return cases;
}

}  // namespace flashport_test
