// A run of one case: its arguments, a connection, and calls on raw bytes.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/impl/codegen/client_unary_call.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/sync_stream.h>

#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

using grpc::StatusCode;

inline void check(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

inline std::string told(const grpc::Status& status) {
  return std::to_string(status.error_code()) + " " + status.error_message();
}

inline void ok(const grpc::Status& status, const std::string& what) { check(status.ok(), what + ": " + told(status)); }

inline void is_code(const grpc::Status& status, StatusCode code, const std::string& what) {
  check(status.error_code() == code, what + ": " + told(status) + ", not " + std::to_string(code));
}

// A context with a deadline.
std::unique_ptr<grpc::ClientContext> soon(int timeout_ms = 30000);

grpc::ByteBuffer packed(const std::string& bytes);
std::string unpacked(grpc::ByteBuffer* buffer);

using Channel = std::shared_ptr<grpc::Channel>;

// A call of any form.
class Stream {
 public:
  Stream(const Channel& channel, const char* method, grpc::ClientContext* context);

  bool send(const std::string& message) { return call_->Write(packed(message)); }
  bool recv(std::string* message);
  void echoed(const std::string& message);
  void close() { call_->WritesDone(); }
  void headers() { call_->WaitForInitialMetadata(); }
  grpc::Status end() { return call_->Finish(); }

 private:
  std::unique_ptr<grpc::ClientReaderWriter<grpc::ByteBuffer, grpc::ByteBuffer>> call_;
};

struct Stats {
  int num_slow;
  int num_cancelled;
};

class Test {
 public:
  explicit Test(std::map<std::string, std::string> arguments);

  Channel connect(grpc::ChannelArguments options = {}) const;
  // A unary call of a method's full path, or of one of test.Echo.
  grpc::Status unary(const std::string& method, const std::string& request, std::string* answer = nullptr,
                     grpc::ClientContext* context = nullptr, Channel channel = nullptr) const;
  void same(const std::string& request, const Channel& channel = nullptr, const char* method = "Unary") const;
  Stats stats() const;
  void await(const std::string& what, const std::function<bool(Stats)>& is_so) const;

  std::map<std::string, std::string> arguments;
  Channel channel;
};

using Cases = std::map<std::string, std::function<void(Test&)>>;
Cases calls();
Cases load_cases();
Cases model_cases();

// Runs all of them at once, each on a thread; throws what one of them threw.
void together(int number, const std::function<void(int)>& run);
