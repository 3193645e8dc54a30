// Cases on the V2 protocol with generated code, and health.
#include "grpc_service.grpc.pb.h"
#include "test.h"

namespace {

using inference::GRPCInferenceService;
using inference::ModelInferRequest;
using inference::ModelInferResponse;

ModelInferRequest asked(const std::string& name, int value, int length) {
  ModelInferRequest request;
  request.set_model_name(name);
  request.set_id("request " + std::to_string(value));
  auto* input = request.add_inputs();
  input->set_name("INPUT0");
  input->set_datatype("UINT8");
  input->add_shape(length);
  request.add_raw_input_contents(std::string(length, static_cast<char>(value)));
  return request;
}

void answers(const ModelInferResponse& answer, const ModelInferRequest& request) {
  check(answer.id() == request.id() && answer.outputs(0).name() == "OUTPUT0", answer.id());
  check(answer.raw_output_contents(0) == request.raw_input_contents(0), "another tensor");
}

void model(Test& t) {
  auto stub = GRPCInferenceService::NewStub(t.channel);
  inference::ServerLiveResponse live;
  ok(stub->ServerLive(soon().get(), {}, &live), "ServerLive");
  inference::ModelReadyRequest named;
  named.set_name("echo");
  inference::ModelReadyResponse ready;
  ok(stub->ModelReady(soon().get(), named, &ready), "ModelReady");
  inference::ModelMetadataRequest described;
  described.set_name("echo");
  inference::ModelMetadataResponse found;
  ok(stub->ModelMetadata(soon().get(), described, &found), "ModelMetadata");
  check(live.live() && ready.ready() && found.inputs(0).name() == "INPUT0", found.DebugString());
}

void model_infer(Test& t) {
  for (auto algorithm : {GRPC_COMPRESS_NONE, GRPC_COMPRESS_GZIP}) {
    auto stub = GRPCInferenceService::NewStub(t.channel);
    for (int value = 1; value < 50; ++value) {
      auto context = soon();
      context->set_compression_algorithm(algorithm);
      auto request = asked("echo", value, 16);
      ModelInferResponse answer;
      ok(stub->ModelInfer(context.get(), request, &answer), "ModelInfer");
      answers(answer, request);
    }
  }
}

void model_big(Test& t) {
  auto request = asked("echo", 7, 40000000);
  ModelInferResponse answer;
  ok(GRPCInferenceService::NewStub(t.channel)->ModelInfer(soon().get(), request, &answer), "ModelInfer");
  answers(answer, request);
}

void model_error(Test& t) {
  auto stub = GRPCInferenceService::NewStub(t.channel);
  ModelInferResponse answer;
  auto status = stub->ModelInfer(soon().get(), asked("nobody", 1, 16), &answer);
  is_code(status, StatusCode::NOT_FOUND, "ModelInfer");
  check(status.error_message().find("nobody") != std::string::npos, told(status));
  auto wrong = asked("echo", 1, 16);
  wrong.set_raw_input_contents(0, "short");
  is_code(stub->ModelInfer(soon().get(), wrong, &answer), StatusCode::INVALID_ARGUMENT, "ModelInfer");
}

void model_stream(Test& t) {
  auto context = soon();
  auto call = GRPCInferenceService::NewStub(t.channel)->ModelStreamInfer(context.get());
  inference::ModelStreamInferResponse answer;
  for (int value = 0; value < 20; ++value) {
    auto request = asked("echo", value, 16);
    check(call->Write(request) && call->Read(&answer), "call");
    check(answer.error_message().empty(), answer.error_message());
    answers(answer.infer_response(), request);
  }
  check(call->Write(asked("nobody", 1, 16)) && call->Read(&answer), "call");
  check(answer.error_message().find("nobody") != std::string::npos, answer.error_message());
  call->WritesDone();
  check(!call->Read(&answer), "one message too many");
  ok(call->Finish(), "end");
}

// HealthCheckRequest and its response by hand: field 1 is the service's name, and the status, 1 for SERVING.
void health(Test& t) {
  auto named = [](const std::string& name) {
    return name.empty() ? name : std::string("\n") + static_cast<char>(name.size()) + name;
  };
  std::string answer;
  for (const char* name : {"", "inference.GRPCInferenceService"}) {
    ok(t.unary("/grpc.health.v1.Health/Check", named(name), &answer), "Check");
    check(answer == "\x08\x01", name);
  }
  is_code(t.unary("/grpc.health.v1.Health/Check", named("nobody")), StatusCode::NOT_FOUND, "Check");
  auto context = soon();
  Stream watch(t.channel, "/grpc.health.v1.Health/Watch", context.get());
  watch.send("");
  watch.close();
  check(watch.recv(&answer) && answer == "\x08\x01", "Watch");
  context->TryCancel();
  is_code(watch.end(), StatusCode::CANCELLED, "end");
}

}  // namespace

Cases model_cases() {
  return {{"model", model}, {"model_infer", model_infer}, {"model_big", model_big}, {"model_error", model_error},
          {"model_stream", model_stream}, {"health", health}};
}
