// Cases on raw bytes, one call after another.
#include "test.h"

namespace {

const char* const kBidi = "/test.Echo/BidiStream";
const char kSpecial[] = "\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP \U0001F608\t\n%41";

void unary(Test& t) {
  for (size_t size : {0, 1, 16384, 65535, 271828}) t.same(std::string(size, '\7'));
}

void client_stream(Test& t) {
  auto context = soon();
  Stream call(t.channel, "/test.Echo/ClientStream", context.get());
  for (size_t size : {27182, 8, 1828, 45904}) check(call.send(std::string(size, 'a')), "send");
  call.close();
  std::string answer;
  check(call.recv(&answer) && answer == "4 74922", answer);
  ok(call.end(), "end");
}

void server_stream(Test& t) {
  auto context = soon();
  Stream call(t.channel, "/test.Echo/ServerStream", context.get());
  call.send("40 31415");
  call.close();
  std::string answer;
  for (int number = 0; number < 40; ++number) {
    check(call.recv(&answer) && answer == std::string(31415, static_cast<char>(number)), "message");
  }
  check(!call.recv(&answer), "one message too many");
  ok(call.end(), "end");
}

void ping_pong(Test& t) {
  auto context = soon();
  Stream call(t.channel, kBidi, context.get());
  for (size_t size : {27182, 8, 1828, 45904, 0}) call.echoed(std::string(size, 'a'));
  call.close();
  std::string answer;
  check(!call.recv(&answer), "one message too many");
  ok(call.end(), "end");
}

void empty_stream(Test& t) {
  auto context = soon();
  Stream call(t.channel, kBidi, context.get());
  call.close();
  std::string answer;
  check(!call.recv(&answer), "a message");
  ok(call.end(), "end");
}

void first_word(Test& t) {
  auto context = soon();
  Stream call(t.channel, "/test.Talk/Greet", context.get());
  std::string answer;
  check(call.recv(&answer) && answer == "hello", answer);
  call.echoed("answer");
  call.close();
  ok(call.end(), "end");
}

void early_end(Test& t) {
  for (int round = 0; round < 20; ++round) {
    auto context = soon();
    Stream call(t.channel, "/test.Talk/First", context.get());
    for (int number = 0; number < 50 && call.send(std::string(10000, 'a')); ++number) {
    }
    std::string answer;
    check(call.recv(&answer) && answer.size() == 10000, "answer");
    ok(call.end(), "end");
  }
}

void deadline(Test& t) {
  int before = t.stats().num_cancelled;
  is_code(t.unary("Slow", "", nullptr, soon(200).get()), StatusCode::DEADLINE_EXCEEDED, "Slow");
  t.await("the server sees it", [=](Stats s) { return s.num_slow == 0 && s.num_cancelled == before + 1; });
}

void deadline_stream(Test& t) {
  t.same("the connection is there");
  auto context = soon(100);
  Stream call(t.channel, kBidi, context.get());
  call.echoed("a");
  std::string answer;
  check(!call.recv(&answer), "a message");
  is_code(call.end(), StatusCode::DEADLINE_EXCEEDED, "end");
  is_code(t.unary("Slow", "", nullptr, soon(1).get()), StatusCode::DEADLINE_EXCEEDED, "1 ms");
}

void cancel(Test& t) {
  int before = t.stats().num_cancelled;
  auto context = soon();
  grpc::Status status;
  std::thread calling([&] { status = t.unary("Slow", "", nullptr, context.get()); });
  t.await("it runs", [](Stats s) { return s.num_slow == 1; });
  context->TryCancel();
  calling.join();
  is_code(status, StatusCode::CANCELLED, "Slow");
  t.await("the server sees it", [=](Stats s) { return s.num_slow == 0 && s.num_cancelled == before + 1; });
}

void cancel_before_messages(Test& t) {
  auto context = soon();
  Stream call(t.channel, "/test.Echo/ClientStream", context.get());
  context->TryCancel();
  is_code(call.end(), StatusCode::CANCELLED, "end");
}

void cancel_after_answer(Test& t) {
  auto context = soon();
  Stream call(t.channel, kBidi, context.get());
  call.echoed(std::string(27182, 'a'));
  context->TryCancel();
  is_code(call.end(), StatusCode::CANCELLED, "end");
}

using Pairs = std::multimap<std::string, std::string>;
using Received = std::multimap<grpc::string_ref, grpc::string_ref>;

const Pairs& sent() {
  static const Pairs pairs = {{"initial-text", "some text"},
                              {"initial-text", "and more"},
                              {"initial-a-bin", ""},
                              {"initial-b-bin", std::string(1, '\0')},
                              {"initial-c-bin", "\xff\xfe"},
                              {"trailing-d-bin", "\xab\xab\xab"},
                              {"trailing-d-bin", std::string("\0\1\2\3", 4)},
                              {"trailing-text", "~!,;="}};
  return pairs;
}

void add_sent(grpc::ClientContext* context) {
  for (const auto& pair : sent()) context->AddMetadata(pair.first, pair.second);
}

void compare(const Received& got, const std::string& prefix) {
  for (auto pair = sent().lower_bound(prefix); pair != sent().end() && pair->first.rfind(prefix, 0) == 0;
       pair = sent().upper_bound(pair->first)) {
    std::vector<std::string> expected, values;
    auto range = sent().equal_range(pair->first);
    for (auto at = range.first; at != range.second; ++at) expected.push_back(at->second);
    auto found = got.equal_range(pair->first);
    for (auto at = found.first; at != found.second; ++at) values.emplace_back(at->second.data(), at->second.size());
    check(values == expected, pair->first + " came back as others, " + std::to_string(values.size()));
  }
}

void metadata(Test& t) {
  for (int code : {0, 5}) {
    auto context = soon();
    add_sent(context.get());
    context->AddMetadata("want-code", std::to_string(code));
    check(t.unary("Status", "", nullptr, context.get()).error_code() == code, "another code");
    compare(context->GetServerInitialMetadata(), "initial-");
    compare(context->GetServerTrailingMetadata(), "trailing-");
  }
  auto context = soon();
  add_sent(context.get());
  std::string answer;
  ok(t.unary("Meta", "", &answer, context.get()), "Meta");
  for (const char* pair : {"[\"initial-text\", \"some text\"]", "[\"initial-text\", \"and more\"]", "[\"initial-a-bin\", \"\"]",
                           "[\"initial-b-bin\", \"00\"]", "[\"trailing-d-bin\", \"ababab\"]",
                           "[\"trailing-d-bin\", \"00010203\"]", "[\"trailing-text\", \"~!,;=\"]"}) {
    check(answer.find(pair) != std::string::npos, std::string(pair) + " is not in " + answer);
  }
}

void metadata_stream(Test& t) {
  auto context = soon();
  add_sent(context.get());
  Stream call(t.channel, "/test.Talk/End", context.get());
  call.headers();  // before any message
  compare(context->GetServerInitialMetadata(), "initial-");
  call.echoed("a");
  ok(call.end(), "end");
  compare(context->GetServerTrailingMetadata(), "trailing-");
}

void status_codes(Test& t) {
  for (int code = 1; code <= 16; ++code) {
    auto context = soon();
    context->AddMetadata("want-code", std::to_string(code));
    context->AddMetadata("want-details", "code " + std::to_string(code));
    auto status = t.unary("Status", "", nullptr, context.get());
    check(status.error_code() == code && status.error_message() == "code " + std::to_string(code), told(status));
  }
  auto status = t.unary("/test.Talk/Fail", kSpecial);
  check(status.error_code() == StatusCode::UNKNOWN && status.error_message() == kSpecial, told(status));
}

void status_stream(Test& t) {
  auto context = soon();
  context->AddMetadata("want-code", "2");
  context->AddMetadata("want-details", "test status message");
  context->AddMetadata("trailing-a", "b");
  Stream call(t.channel, "/test.Talk/End", context.get());
  call.echoed("a");
  auto status = call.end();
  check(status.error_code() == 2 && status.error_message() == "test status message", told(status));
  check(context->GetServerTrailingMetadata().count("trailing-a") == 1, "trailing metadata");
}

void unimplemented(Test& t) {
  for (const char* path : {"/test.Echo/Nothing", "/test.Nobody/Unary"}) {
    is_code(t.unary(path, ""), StatusCode::UNIMPLEMENTED, path);
  }
}

void gzip(Test& t) {
  std::string request;
  while (request.size() < 1200000) request += "compress me ";
  for (auto algorithm : {GRPC_COMPRESS_NONE, GRPC_COMPRESS_GZIP}) {
    grpc::ChannelArguments options;
    options.SetCompressionAlgorithm(algorithm);
    auto channel = t.connect(options);
    t.same(request, channel);
    t.same(request, channel, "/test.Talk/Compressed");
    auto context = soon();
    Stream call(channel, "/test.Talk/CompressedStream", context.get());
    for (size_t size : {0, 1, 1200000}) call.echoed(request.substr(0, size));
  }
}

void big(Test& t) {
  std::string request;
  while (request.size() < 40000000) request += "0123456789";
  t.same(request);
}

void too_large(Test& t) {
  is_code(t.unary("Size", std::string(200000, 'a')), StatusCode::RESOURCE_EXHAUSTED, "Size");
  t.same(std::string(1000, 'a'));
}

// Larger than servers take: an error, and other calls are served.
void large_headers(Test& t) {
  auto context = soon();
  context->AddMetadata("x-large", std::string(63000, 'x'));
  auto status = t.unary("Unary", "", nullptr, context.get());
  check(status.error_code() != StatusCode::DEADLINE_EXCEEDED, told(status));
  auto small = soon();
  small->AddMetadata("x-large", std::string(4000, 'x'));
  ok(t.unary("Unary", "", nullptr, small.get()), "4 kB");
}

void refused(Test& t) { is_code(t.unary("Unary", "", nullptr, soon(3000).get()), StatusCode::UNAVAILABLE, "unary"); }

}  // namespace

Cases calls() {
  return {{"unary", unary}, {"client_stream", client_stream}, {"server_stream", server_stream}, {"ping_pong", ping_pong},
          {"empty_stream", empty_stream}, {"first_word", first_word}, {"early_end", early_end}, {"deadline", deadline},
          {"deadline_stream", deadline_stream}, {"cancel", cancel}, {"cancel_before_messages", cancel_before_messages},
          {"cancel_after_answer", cancel_after_answer}, {"metadata", metadata}, {"metadata_stream", metadata_stream},
          {"status_codes", status_codes}, {"status_stream", status_stream}, {"unimplemented", unimplemented},
          {"gzip", gzip}, {"big", big}, {"too_large", too_large}, {"large_headers", large_headers}, {"refused", refused}};
}
