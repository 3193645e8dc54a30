package main

import (
	"bytes"
	"fmt"
	"inference"
	"io"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"
)

func (t *test) inference() inference.GRPCInferenceServiceClient {
	return inference.NewGRPCInferenceServiceClient(t.conn)
}

func request(name string, value byte, num int) *inference.ModelInferRequest {
	return &inference.ModelInferRequest{
		ModelName: name,
		Id:        fmt.Sprint("request ", value),
		Inputs: []*inference.ModelInferRequest_InferInputTensor{
			{Name: "INPUT0", Datatype: "UINT8", Shape: []int64{int64(num)}},
		},
		RawInputContents: [][]byte{bytes.Repeat([]byte{value}, num)},
	}
}

func (t *test) answers(answer *inference.ModelInferResponse, request *inference.ModelInferRequest) {
	check(answer.Id == request.Id, "id %q", answer.Id)
	check(len(answer.Outputs) == 1 && answer.Outputs[0].Name == "OUTPUT0", "%v", answer.Outputs)
	check(bytes.Equal(answer.RawOutputContents[0], request.RawInputContents[0]), "another tensor")
}

func model(t *test) {
	live, err := t.inference().ServerLive(soon(), &inference.ServerLiveRequest{})
	check(err == nil && live.Live, "%v %v", live, err)
	ready, err := t.inference().ModelReady(soon(), &inference.ModelReadyRequest{Name: "echo"})
	check(err == nil && ready.Ready, "%v %v", ready, err)
	found, err := t.inference().ModelMetadata(soon(), &inference.ModelMetadataRequest{Name: "echo"})
	check(err == nil && found.Inputs[0].Name == "INPUT0", "%v %v", found, err)
}

func modelInfer(t *test) {
	for _, options := range [][]grpc.CallOption{{}, {grpc.UseCompressor(gzip.Name)}} {
		for value := byte(1); value < 50; value++ {
			asked := request("echo", value, 16)
			answer, err := t.inference().ModelInfer(soon(), asked, options...)
			ok(err, "ModelInfer")
			t.answers(answer, asked)
		}
	}
}

func modelBig(t *test) {
	asked := request("echo", 7, 40000000)
	answer, err := t.inference().ModelInfer(soon(), asked)
	ok(err, "ModelInfer")
	t.answers(answer, asked)
}

func modelError(t *test) {
	_, err := t.inference().ModelInfer(soon(), request("nobody", 1, 16))
	isCode(err, codes.NotFound, "ModelInfer")
	check(strings.Contains(status.Convert(err).Message(), "nobody"), "%v", err)
	wrong := request("echo", 1, 16)
	wrong.RawInputContents[0] = wrong.RawInputContents[0][1:]
	_, err = t.inference().ModelInfer(soon(), wrong)
	isCode(err, codes.InvalidArgument, "ModelInfer")
}

func modelStream(t *test) {
	call, err := t.inference().ModelStreamInfer(soon())
	ok(err, "ModelStreamInfer")
	for value := byte(0); value < 20; value++ {
		asked := request("echo", value, 16)
		ok(call.Send(asked), "send")
		answer, err := call.Recv()
		ok(err, "recv")
		check(answer.ErrorMessage == "", "%s", answer.ErrorMessage)
		t.answers(answer.InferResponse, asked)
	}
	ok(call.Send(request("nobody", 1, 16)), "send")
	answer, err := call.Recv()
	ok(err, "recv")
	check(strings.Contains(answer.ErrorMessage, "nobody"), "%v", answer)
	ok(call.CloseSend(), "close")
	_, err = call.Recv()
	check(err == io.EOF, "%v", err)
}

func health(t *test) {
	client := grpc_health_v1.NewHealthClient(t.conn)
	for _, service := range []string{"", "inference.GRPCInferenceService"} {
		answer, err := client.Check(soon(), &grpc_health_v1.HealthCheckRequest{Service: service})
		check(err == nil && answer.Status == grpc_health_v1.HealthCheckResponse_SERVING, "%q: %v %v", service, answer, err)
	}
	_, err := client.Check(soon(), &grpc_health_v1.HealthCheckRequest{Service: "nobody"})
	isCode(err, codes.NotFound, "Check")
	call, err := client.Watch(soon(), &grpc_health_v1.HealthCheckRequest{})
	ok(err, "Watch")
	answer, err := call.Recv()
	check(err == nil && answer.Status == grpc_health_v1.HealthCheckResponse_SERVING, "%v %v", answer, err)
}

func reflection(t *test) {
	call, err := grpc_reflection_v1alpha.NewServerReflectionClient(t.conn).ServerReflectionInfo(soon())
	ok(err, "ServerReflectionInfo")
	ok(call.Send(&grpc_reflection_v1alpha.ServerReflectionRequest{
		MessageRequest: &grpc_reflection_v1alpha.ServerReflectionRequest_ListServices{}}), "send")
	answer, err := call.Recv()
	ok(err, "recv")
	check(strings.Contains(answer.String(), "inference.GRPCInferenceService"), "%v", answer)
	ok(call.Send(&grpc_reflection_v1alpha.ServerReflectionRequest{
		MessageRequest: &grpc_reflection_v1alpha.ServerReflectionRequest_FileContainingSymbol{
			FileContainingSymbol: "inference.GRPCInferenceService"}}), "send")
	answer, err = call.Recv()
	ok(err, "recv")
	check(len(answer.GetFileDescriptorResponse().GetFileDescriptorProto()) > 0, "%v", answer)
	ok(call.CloseSend(), "close")
}
