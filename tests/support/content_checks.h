// Contents are checked on GPUs too while this lives.
#pragma once

#include "common/host/contents.h"

namespace flashport_test {

struct ContentChecks {
  ContentChecks() { flashport::set_content_checks(true); }
  ~ContentChecks() { flashport::set_content_checks(false); }
  ContentChecks(const ContentChecks&) = delete;
  ContentChecks& operator=(const ContentChecks&) = delete;
};

}  // namespace flashport_test
