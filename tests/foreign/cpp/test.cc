#include "test.h"

#include <fstream>
#include <iostream>
#include <mutex>

namespace {

std::string read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

int number_after(const std::string& json, const std::string& name) {
  auto at = json.find("\"" + name + "\": ");
  return at == std::string::npos ? 0 : std::stoi(json.substr(at + name.size() + 4));
}

}  // namespace

std::unique_ptr<grpc::ClientContext> soon(int timeout_ms) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(timeout_ms));
  return context;
}

grpc::ByteBuffer packed(const std::string& bytes) {
  grpc::Slice slice(bytes);
  return grpc::ByteBuffer(&slice, 1);
}

std::string unpacked(grpc::ByteBuffer* buffer) {
  std::vector<grpc::Slice> slices;
  if (!buffer->Valid() || !buffer->Dump(&slices).ok()) return "(no message)";
  std::string bytes;
  for (const auto& slice : slices) bytes.append(reinterpret_cast<const char*>(slice.begin()), slice.size());
  return bytes;
}

Stream::Stream(const Channel& channel, const char* method, grpc::ClientContext* context) {
  grpc::internal::RpcMethod called(method, grpc::internal::RpcMethod::BIDI_STREAMING, channel);
  call_.reset(grpc::internal::ClientReaderWriterFactory<grpc::ByteBuffer, grpc::ByteBuffer>::Create(channel.get(), called,
                                                                                                  context));
}

bool Stream::recv(std::string* message) {
  grpc::ByteBuffer buffer;
  if (!call_->Read(&buffer)) return false;
  *message = unpacked(&buffer);
  return true;
}

void Stream::echoed(const std::string& message) {
  std::string answer;
  check(send(message), "send");
  if (!recv(&answer)) throw std::runtime_error("no answer: " + told(end()));
  check(answer == message, "another message came back");
}

Test::Test(std::map<std::string, std::string> given) : arguments(std::move(given)) { channel = connect(); }

Channel Test::connect(grpc::ChannelArguments options) const {
  options.SetMaxReceiveMessageSize(64 << 20);
  options.SetMaxSendMessageSize(-1);
  options.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  auto credentials = grpc::InsecureChannelCredentials();
  auto file = [this](const char* name) { return arguments.count(name) ? read(arguments.at(name)) : std::string(); };
  if (arguments.count("ca")) {
    credentials = grpc::SslCredentials({file("ca"), file("key"), file("cert")});
    options.SetSslTargetNameOverride("localhost");
  }
  return grpc::CreateCustomChannel(arguments.at("address"), credentials, options);
}

grpc::Status Test::unary(const std::string& method, const std::string& request, std::string* answer,
                         grpc::ClientContext* context, Channel on) const {
  auto path = method[0] == '/' ? method : "/test.Echo/" + method;
  auto own = soon();
  if (on == nullptr) on = channel;
  grpc::internal::RpcMethod called(path.c_str(), grpc::internal::RpcMethod::NORMAL_RPC, on);
  grpc::ByteBuffer response;
  auto status = grpc::internal::BlockingUnaryCall<grpc::ByteBuffer, grpc::ByteBuffer>(
      on.get(), called, context ? context : own.get(), packed(request), &response);
  if (answer && status.ok()) *answer = unpacked(&response);
  return status;
}

void Test::same(const std::string& request, const Channel& on, const char* method) const {
  std::string answer;
  ok(unary(method, request, &answer, nullptr, on), method);
  check(answer == request, std::to_string(request.size()) + " bytes came back as others");
}

Stats Test::stats() const {
  std::string answer;
  ok(unary("Stats", "", &answer), "Stats");
  return {number_after(answer, "num_slow"), number_after(answer, "slow_cancelled")};
}

void Test::await(const std::string& what, const std::function<bool(Stats)>& is_so) const {
  auto end = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  while (!is_so(stats())) {
    check(std::chrono::steady_clock::now() < end, what);
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void together(int number, const std::function<void(int)>& run) {
  std::mutex mutex;
  std::vector<std::string> problems;
  std::vector<std::thread> threads;
  for (int index = 0; index < number; ++index) {
    threads.emplace_back([&, index] {
      try {
        run(index);
      } catch (const std::exception& error) {
        std::lock_guard<std::mutex> lock(mutex);
        problems.push_back(error.what());
      }
    });
  }
  for (auto& thread : threads) thread.join();
  check(problems.empty(), std::to_string(problems.size()) + " failed: " + (problems.empty() ? "" : problems[0]));
}

// client CASE NAME=VALUE...: status 0: the case holds; 77: this client cannot do it; otherwise it does not hold.
int main(int argc, char** argv) {
  Cases cases = calls();
  cases.merge(load_cases());
  cases.merge(model_cases());
  std::map<std::string, std::string> arguments;
  for (int index = 2; index < argc; ++index) {
    std::string pair = argv[index];
    arguments[pair.substr(0, pair.find('='))] = pair.substr(pair.find('=') + 1);
  }
  if (!cases.count(argv[1])) {
    std::cerr << "this client has no such case\n";
    return 77;
  }
  try {
    Test test(arguments);
    cases[argv[1]](test);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
