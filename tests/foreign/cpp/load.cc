// Cases with many calls, and those that wait.
#include <atomic>
#include <iostream>
#include <mutex>

#include "test.h"

namespace {

const char* const kBidi = "/test.Echo/BidiStream";

void concurrent_streams(Test& t) {
  std::vector<std::unique_ptr<grpc::ClientContext>> contexts;
  std::vector<std::unique_ptr<Stream>> calls;
  for (int index = 0; index < 100; ++index) {
    contexts.push_back(soon());
    calls.push_back(std::make_unique<Stream>(t.channel, kBidi, contexts.back().get()));
    calls.back()->echoed(std::string(1, static_cast<char>(index)));
  }
  together(100, [&](int index) {
    for (int number = 0; number < 20; ++number) {
      calls[index]->echoed(std::string(number * 500, static_cast<char>(index)));
    }
    calls[index]->close();
    ok(calls[index]->end(), "end");
  });
}

void concurrent_large(Test& t) {
  together(100, [&](int index) { t.same(std::string(271828, static_cast<char>(index))); });
}

void few_streams(Test& t) {
  t.same("the server's settings have come");
  together(200, [&](int index) { t.same(std::string(1, static_cast<char>(index))); });
}

void ten_thousand(Test& t) {
  for (int number = 0; number < 10000; ++number) t.same(std::to_string(number));
}

void slow_reader(Test& t) {
  auto context = soon();
  Stream call(t.channel, "/test.Echo/ServerStream", context.get());
  call.send("300 100000");
  call.close();
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  std::string answer;
  for (int number = 0; number < 300; ++number) {
    t.same("beside it");
    check(call.recv(&answer) && answer == std::string(100000, static_cast<char>(number)), "message");
  }
  ok(call.end(), "end");
}

void many_channels(Test& t) {
  together(50, [&](int) {
    auto channel = t.connect();
    for (int number = 0; number < 10; ++number) t.same("a", channel);
  });
}

Channel pinging(Test& t, int every_ms) {
  grpc::ChannelArguments options;
  options.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, every_ms);
  options.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 5000);
  options.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  return t.connect(options);
}

void keepalive_kept(Test& t) {
  auto context = soon();
  auto channel = pinging(t, 500);
  Stream call(channel, kBidi, context.get());
  for (int round = 0; round < 2; ++round) {
    call.echoed("a");
    std::this_thread::sleep_for(std::chrono::seconds(3));
  }
  call.echoed("b");
}

void keepalive_punished(Test& t) {
  auto context = soon(10000);
  auto channel = pinging(t, 100);
  Stream call(channel, kBidi, context.get());
  call.echoed("a");
  std::string answer;
  check(!call.recv(&answer), "a message");
  is_code(call.end(), StatusCode::UNAVAILABLE, "end");
}

// Pauses between calls for longer and longer, until the server has closed the connection between two of them.
void idle(Test& t) {
  for (int pause = 0; pause < 12; ++pause) {
    t.same("a");
    std::this_thread::sleep_for(std::chrono::milliseconds(150 * pause));
  }
}

std::string from_hex(const std::string& digits) {
  std::string bytes;
  for (size_t at = 0; at < digits.size(); at += 2) {
    bytes += static_cast<char>(std::stoi(digits.substr(at, 2), nullptr, 16));
  }
  return bytes;
}

// Calls, eight at a time, until standard input ends; no call may fail. With "path" and "request" (in hexadecimal) it calls
// another method, and does not look at the answer.
void load(Test& t) {
  std::atomic<bool> is_over{false};
  std::atomic<int> num_answered{0};
  std::mutex mutex;
  std::map<std::string, int> errors;
  const bool has_path = t.arguments.count("path");
  const auto fixed = from_hex(has_path ? t.arguments["request"] : "");
  std::thread waiting([&] {
    while (std::cin.get() != EOF) {
    }
    is_over = true;
  });
  together(8, [&](int index) {
    for (int number = 0; !is_over; ++number) {
      auto context = soon();
      context->set_wait_for_ready(true);
      std::string request(50, static_cast<char>(index * 16 + number % 16)), answer;
      auto status = t.unary(has_path ? t.arguments.at("path") : "Unary", has_path ? fixed : request, &answer, context.get());
      if (!status.ok() || (!has_path && answer != request)) {
        std::lock_guard<std::mutex> lock(mutex);
        ++errors[status.ok() ? "another's answer" : told(status)];
      }
      if (++num_answered == 100) std::cout << "running" << std::endl;
    }
  });
  waiting.join();
  for (const auto& error : errors) {
    check(false, std::to_string(error.second) + " of " + std::to_string(num_answered) + " calls: " + error.first);
  }
}

}  // namespace

Cases load_cases() {
  return {{"concurrent_streams", concurrent_streams}, {"concurrent_large", concurrent_large},
          {"few_streams", few_streams}, {"ten_thousand", ten_thousand}, {"slow_reader", slow_reader},
          {"many_channels", many_channels}, {"keepalive_kept", keepalive_kept},
          {"keepalive_punished", keepalive_punished}, {"idle", idle}, {"load", load}};
}
