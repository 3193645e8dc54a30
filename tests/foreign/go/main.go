// A gRPC client in Go for tests of servers: client CASE NAME=VALUE...
//
// Status 0: the case holds. 77: this client cannot do it, the reason is on standard error. Otherwise it does not hold.
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io/ioutil"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
)

const limit = 64 << 20

// raw passes bytes as they are.
type raw struct{}

func (raw) Marshal(v interface{}) ([]byte, error)      { return *v.(*[]byte), nil }
func (raw) Unmarshal(data []byte, v interface{}) error { *v.(*[]byte) = data; return nil }
func (raw) Name() string                               { return "raw" }
func (raw) String() string                             { return "raw" }

// failure is what check throws.
type failure string

func check(holds bool, format string, values ...interface{}) {
	if !holds {
		panic(failure(fmt.Sprintf(format, values...)))
	}
}

func ok(err error, what string) { check(err == nil, "%s: %v", what, err) }

func isCode(err error, want codes.Code, what string) {
	check(status.Code(err) == want, "%s: %v, not %v", what, err, want)
}

// test is one run: its arguments, and a connection.
type test struct {
	arguments map[string]string
	conn      *grpc.ClientConn
}

func (t *test) dial(options ...grpc.DialOption) *grpc.ClientConn {
	options = append(options, t.security(), grpc.WithDefaultCallOptions(
		grpc.MaxCallRecvMsgSize(limit), grpc.MaxCallSendMsgSize(2*limit)))
	conn, err := grpc.Dial(t.arguments["address"], options...)
	ok(err, "dial")
	return conn
}

func (t *test) security() grpc.DialOption {
	if t.arguments["ca"] == "" {
		return grpc.WithInsecure()
	}
	config := &tls.Config{RootCAs: x509.NewCertPool(), ServerName: "localhost"}
	ca, err := ioutil.ReadFile(t.arguments["ca"])
	ok(err, "ca")
	config.RootCAs.AppendCertsFromPEM(ca)
	if t.arguments["cert"] != "" {
		pair, err := tls.LoadX509KeyPair(t.arguments["cert"], t.arguments["key"])
		ok(err, "cert")
		config.Certificates = []tls.Certificate{pair}
	}
	return grpc.WithTransportCredentials(credentials.NewTLS(config))
}

func soon() context.Context {
	ctx, _ := context.WithTimeout(context.Background(), 30*time.Second)
	return ctx
}

func (t *test) unaryOn(conn *grpc.ClientConn, ctx context.Context, method string, request []byte,
	options ...grpc.CallOption) ([]byte, error) {
	var answer []byte
	err := conn.Invoke(ctx, method, &request, &answer, append(options, grpc.ForceCodec(raw{}))...)
	return answer, err
}

func (t *test) unary(ctx context.Context, method string, request []byte, options ...grpc.CallOption) ([]byte, error) {
	return t.unaryOn(t.conn, ctx, "/test.Echo/"+method, request, options...)
}

// stream is a call of any form.
type stream struct{ grpc.ClientStream }

func (t *test) stream(ctx context.Context, method string, options ...grpc.CallOption) stream {
	description := &grpc.StreamDesc{ClientStreams: true, ServerStreams: true}
	opened, err := t.conn.NewStream(ctx, description, method, append(options, grpc.ForceCodec(raw{}))...)
	ok(err, method)
	return stream{opened}
}

func (s stream) send(message []byte) error { return s.SendMsg(&message) }

func (s stream) recv() ([]byte, error) {
	var message []byte
	err := s.RecvMsg(&message)
	return message, err
}

func (s stream) echoed(message []byte) {
	ok(s.send(message), "send")
	answer, err := s.recv()
	ok(err, "recv")
	check(bytes.Equal(answer, message), "%d bytes came back as %d", len(message), len(answer))
}

type stats struct {
	NumSlow int `json:"num_slow"`
	Counts  map[string]int
}

func (t *test) stats() stats {
	answer, err := t.unary(soon(), "Stats", nil)
	ok(err, "Stats")
	var found stats
	ok(json.Unmarshal(answer, &found), "Stats")
	return found
}

func (t *test) await(what string, isSo func(stats) bool) {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		found := t.stats()
		if isSo(found) {
			return
		}
		check(time.Now().Before(end), "%s: %+v", what, found)
	}
}

func main() {
	defer func() {
		if problem := recover(); problem != nil {
			fmt.Fprintln(os.Stderr, problem)
			os.Exit(1)
		}
	}()
	t := &test{arguments: map[string]string{}}
	for _, argument := range os.Args[2:] {
		pair := strings.SplitN(argument, "=", 2)
		t.arguments[pair[0]] = pair[1]
	}
	run := cases[os.Args[1]]
	if run == nil {
		fmt.Fprintln(os.Stderr, "this client has no such case")
		os.Exit(77)
	}
	t.conn = t.dial()
	run(t)
}

var cases map[string]func(*test)

func init() {
	cases = map[string]func(*test){
		"unary": unary, "client_stream": clientStream, "server_stream": serverStream, "ping_pong": pingPong,
		"empty_stream": emptyStream, "first_word": firstWord, "early_end": earlyEnd, "deadline": deadline,
		"deadline_stream": deadlineStream, "cancel": cancel, "cancel_before_messages": cancelBeforeMessages,
		"cancel_after_answer": cancelAfterAnswer, "metadata": metadataUnary, "metadata_stream": metadataStream,
		"status_codes": statusCodes, "status_stream": statusStream, "unimplemented": unimplemented, "gzip": gzipBoth,
		"unknown_compression": unknownCompression, "big": big, "too_large": tooLarge,
		"concurrent_streams": concurrentStreams, "concurrent_large": concurrentLarge, "few_streams": fewStreams,
		"ten_thousand": tenThousand, "large_headers": largeHeaders, "slow_reader": slowReader,
		"many_channels": manyChannels, "keepalive_kept": keepaliveKept, "idle": idle, "refused": refused, "load": load,
		"model": model, "model_infer": modelInfer, "model_big": modelBig, "model_error": modelError,
		"model_stream": modelStream, "health": health, "reflection": reflection,
	}
}
