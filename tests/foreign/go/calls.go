package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
)

const special = "\t\ntest with whitespace\r\nand Unicode BMP \u263a and non-BMP \U0001F608\t\n%41"

func unary(t *test) {
	for _, size := range []int{0, 1, 16384, 65535, 271828} {
		request := bytes.Repeat([]byte{7}, size)
		answer, err := t.unary(soon(), "Unary", request)
		ok(err, "unary")
		check(bytes.Equal(answer, request), "%d bytes came back as %d", size, len(answer))
	}
}

func clientStream(t *test) {
	call := t.stream(soon(), "/test.Echo/ClientStream")
	for _, size := range []int{27182, 8, 1828, 45904} {
		ok(call.send(make([]byte, size)), "send")
	}
	ok(call.CloseSend(), "close")
	answer, err := call.recv()
	ok(err, "recv")
	check(string(answer) == "4 74922", "%s", answer)
}

func serverStream(t *test) {
	call := t.stream(soon(), "/test.Echo/ServerStream")
	ok(call.send([]byte("40 31415")), "send")
	ok(call.CloseSend(), "close")
	for number := 0; number < 40; number++ {
		answer, err := call.recv()
		ok(err, "recv")
		check(len(answer) == 31415 && answer[0] == byte(number), "message %d has %d bytes", number, len(answer))
	}
	_, err := call.recv()
	check(err == io.EOF, "%v after the last message", err)
}

func pingPong(t *test) {
	call := t.stream(soon(), "/test.Echo/BidiStream")
	for _, size := range []int{27182, 8, 1828, 45904, 0} {
		call.echoed(make([]byte, size))
	}
	ok(call.CloseSend(), "close")
	_, err := call.recv()
	check(err == io.EOF, "%v after the last message", err)
}

func emptyStream(t *test) {
	call := t.stream(soon(), "/test.Echo/BidiStream")
	ok(call.CloseSend(), "close")
	_, err := call.recv()
	check(err == io.EOF, "%v", err)
}

func firstWord(t *test) {
	call := t.stream(soon(), "/test.Talk/Greet")
	answer, err := call.recv()
	ok(err, "recv")
	check(string(answer) == "hello", "%s", answer)
	call.echoed([]byte("answer"))
	ok(call.CloseSend(), "close")
	_, err = call.recv()
	check(err == io.EOF, "%v", err)
}

// earlyEnd goes on sending when the server has answered.
func earlyEnd(t *test) {
	for round := 0; round < 20; round++ {
		call := t.stream(soon(), "/test.Talk/First")
		var err error
		for number := 0; number < 50 && err == nil; number++ {
			err = call.send(make([]byte, 10000))
		}
		check(err == nil || err == io.EOF, "send: %v", err)
		answer, err := call.recv()
		ok(err, "recv")
		check(len(answer) == 10000, "%d bytes", len(answer))
	}
}

func deadline(t *test) {
	before := t.stats().Counts["slow_cancelled"]
	ctx, end := context.WithTimeout(context.Background(), 200*time.Millisecond)
	defer end()
	_, err := t.unary(ctx, "Slow", nil)
	isCode(err, codes.DeadlineExceeded, "Slow")
	t.await("the server sees it", func(s stats) bool { return s.NumSlow == 0 && s.Counts["slow_cancelled"] == before+1 })
}

func deadlineStream(t *test) {
	ctx, end := context.WithTimeout(context.Background(), 100*time.Millisecond)
	defer end()
	call := t.stream(ctx, "/test.Echo/BidiStream")
	call.echoed([]byte("a"))
	_, err := call.recv()
	isCode(err, codes.DeadlineExceeded, "recv")
	short, endShort := context.WithTimeout(context.Background(), time.Millisecond)
	defer endShort()
	_, err = t.unary(short, "Slow", nil)
	isCode(err, codes.DeadlineExceeded, "1 ms")
}

func cancel(t *test) {
	before := t.stats().Counts["slow_cancelled"]
	ctx, end := context.WithCancel(context.Background())
	failed := make(chan error)
	go func() {
		_, err := t.unary(ctx, "Slow", nil)
		failed <- err
	}()
	t.await("it runs", func(s stats) bool { return s.NumSlow == 1 })
	end()
	isCode(<-failed, codes.Canceled, "Slow")
	t.await("the server sees it", func(s stats) bool { return s.NumSlow == 0 && s.Counts["slow_cancelled"] == before+1 })
}

func cancelBeforeMessages(t *test) {
	ctx, end := context.WithCancel(context.Background())
	call := t.stream(ctx, "/test.Echo/ClientStream")
	end()
	_, err := call.recv()
	isCode(err, codes.Canceled, "recv")
}

func cancelAfterAnswer(t *test) {
	ctx, end := context.WithCancel(context.Background())
	call := t.stream(ctx, "/test.Echo/BidiStream")
	call.echoed(make([]byte, 27182))
	end()
	_, err := call.recv()
	isCode(err, codes.Canceled, "recv")
}

func sent() metadata.MD {
	return metadata.Pairs("initial-text", "some text", "initial-text", "and more", "initial-a-bin", "", "initial-b-bin", "\x00",
		"initial-c-bin", "\xff\xfe", "trailing-d-bin", "\xab\xab\xab", "trailing-d-bin", "\x00\x01\x02\x03", "trailing-text", "~!,;=")
}

func same(got metadata.MD, prefix string) {
	for name, values := range sent() {
		if strings.HasPrefix(name, prefix) {
			check(fmt.Sprint(got[name]) == fmt.Sprint(values), "%s: %q, not %q", name, got[name], values)
		}
	}
}

func metadataUnary(t *test) {
	for _, code := range []string{"0", "5"} {
		md := metadata.Join(sent(), metadata.Pairs("want-code", code))
		var header, trailer metadata.MD
		ctx := metadata.NewOutgoingContext(soon(), md)
		_, err := t.unary(ctx, "Status", nil, grpc.Header(&header), grpc.Trailer(&trailer))
		check(fmt.Sprint(uint32(status.Code(err))) == code, "%v", err)
		same(header, "initial-")
		same(trailer, "trailing-")
	}
	answer, err := t.unary(metadata.NewOutgoingContext(soon(), sent()), "Meta", nil)
	ok(err, "Meta")
	for _, pair := range []string{`["initial-text", "some text"]`, `["initial-text", "and more"]`, `["initial-a-bin", ""]`,
		`["initial-b-bin", "00"]`, `["trailing-d-bin", "ababab"]`, `["trailing-d-bin", "00010203"]`, `["trailing-text", "~!,;="]`} {
		check(strings.Contains(string(answer), pair), "no %s in %s", pair, answer)
	}
}

func metadataStream(t *test) {
	call := t.stream(metadata.NewOutgoingContext(soon(), sent()), "/test.Talk/End")
	header, err := call.Header() // before any message
	ok(err, "header")
	same(header, "initial-")
	call.echoed([]byte("a"))
	_, err = call.recv()
	check(err == io.EOF, "%v", err)
	same(call.Trailer(), "trailing-")
}

func statusCodes(t *test) {
	for code := 1; code <= 16; code++ {
		ctx := metadata.AppendToOutgoingContext(soon(), "want-code", fmt.Sprint(code), "want-details", fmt.Sprint("code ", code))
		_, err := t.unary(ctx, "Status", nil)
		check(int(status.Code(err)) == code && status.Convert(err).Message() == fmt.Sprint("code ", code), "%d: %v", code, err)
	}
	_, err := t.unaryOn(t.conn, soon(), "/test.Talk/Fail", []byte(special))
	isCode(err, codes.Unknown, "Fail")
	check(status.Convert(err).Message() == special, "%q", status.Convert(err).Message())
}

func statusStream(t *test) {
	ctx := metadata.AppendToOutgoingContext(soon(), "want-code", "2", "want-details", "test status message", "trailing-a", "b")
	call := t.stream(ctx, "/test.Talk/End")
	call.echoed([]byte("a"))
	_, err := call.recv()
	isCode(err, codes.Unknown, "End")
	check(status.Convert(err).Message() == "test status message", "%v", err)
	check(fmt.Sprint(call.Trailer()["trailing-a"]) == "[b]", "%v", call.Trailer())
}

func unimplemented(t *test) {
	for _, method := range []string{"/test.Echo/Nothing", "/test.Nobody/Unary"} {
		_, err := t.unaryOn(t.conn, soon(), method, nil)
		isCode(err, codes.Unimplemented, method)
	}
}

func gzipBoth(t *test) {
	request := bytes.Repeat([]byte("compress me "), 100000)
	for _, method := range []string{"/test.Echo/Unary", "/test.Talk/Compressed"} {
		for _, options := range [][]grpc.CallOption{{}, {grpc.UseCompressor(gzip.Name)}} {
			answer, err := t.unaryOn(t.conn, soon(), method, request, options...)
			ok(err, method)
			check(bytes.Equal(answer, request), "%d bytes", len(answer))
		}
	}
	call := t.stream(soon(), "/test.Talk/CompressedStream", grpc.UseCompressor(gzip.Name))
	for _, size := range []int{0, 1, 1200000} {
		call.echoed(request[:size])
	}
}

// bogus is a compression that no server knows.
type bogus struct{}

func (bogus) Name() string                                 { return "bogus" }
func (bogus) Compress(w io.Writer) (io.WriteCloser, error) { return closing{w}, nil }
func (bogus) Decompress(r io.Reader) (io.Reader, error)    { return r, nil }

type closing struct{ io.Writer }

func (closing) Close() error { return nil }

func unknownCompression(t *test) {
	encoding.RegisterCompressor(bogus{})
	_, err := t.unary(soon(), "Unary", []byte("abc"), grpc.UseCompressor("bogus"))
	check(fmt.Sprint(uint32(status.Code(err))) == t.arguments["code"], "%v", err)
	unary(t)
}

func big(t *test) {
	request := bytes.Repeat([]byte("0123456789"), 4000000)
	answer, err := t.unary(soon(), "Unary", request)
	ok(err, "40 MB")
	check(bytes.Equal(answer, request), "%d bytes", len(answer))
}

func tooLarge(t *test) {
	for _, method := range []string{"Size", "Big"} {
		request := make([]byte, 200000)
		if method == "Big" {
			request = []byte("200000")
		}
		answer, err := t.unary(soon(), method, request)
		if method == "Size" {
			isCode(err, codes.ResourceExhausted, method)
		} else if err == nil { // what a server may send is its own affair
			check(len(answer) == 200000, "%d bytes", len(answer))
		}
	}
	_, err := t.unary(soon(), "Unary", make([]byte, 1000))
	ok(err, "the connection serves on")
}

func together(number int, run func(int)) {
	var all sync.WaitGroup
	problems := make(chan interface{}, number)
	for index := 0; index < number; index++ {
		all.Add(1)
		go func(index int) {
			defer all.Done()
			defer func() {
				if problem := recover(); problem != nil {
					problems <- problem
				}
			}()
			run(index)
		}(index)
	}
	all.Wait()
	if len(problems) > 0 {
		panic(fmt.Sprint(len(problems), " of them failed, one so: ", <-problems))
	}
}

func concurrentStreams(t *test) {
	calls := make([]stream, 100)
	for index := range calls {
		calls[index] = t.stream(soon(), "/test.Echo/BidiStream")
		calls[index].echoed([]byte{byte(index)})
	}
	together(len(calls), func(index int) {
		for number := 0; number < 20; number++ {
			calls[index].echoed(bytes.Repeat([]byte{byte(index)}, number*500))
		}
		ok(calls[index].CloseSend(), "close")
		_, err := calls[index].recv()
		check(err == io.EOF, "%v", err)
	})
}

func concurrentLarge(t *test) {
	together(100, func(index int) {
		request := bytes.Repeat([]byte{byte(index)}, 271828)
		answer, err := t.unary(soon(), "Unary", request)
		ok(err, "unary")
		check(bytes.Equal(answer, request), "%d bytes", len(answer))
	})
}

// fewStreams has more calls than the server allows streams.
func fewStreams(t *test) {
	_, err := t.unary(soon(), "Unary", nil) // the server's settings have come
	ok(err, "unary")
	together(200, func(index int) {
		answer, err := t.unary(soon(), "Unary", []byte{byte(index)})
		ok(err, "unary")
		check(answer[0] == byte(index), "%v", answer)
	})
}

func tenThousand(t *test) {
	for number := 0; number < 10000; number++ {
		request := []byte(fmt.Sprint(number))
		answer, err := t.unary(soon(), "Unary", request)
		ok(err, "unary")
		check(bytes.Equal(answer, request), "%s, not %s", answer, request)
	}
}

// largeHeaders are more than servers take: an error, and other calls are served.
func largeHeaders(t *test) {
	ctx := metadata.AppendToOutgoingContext(soon(), "x-large", strings.Repeat("x", 63000))
	_, err := t.unary(ctx, "Unary", nil)
	if err != nil {
		check(status.Code(err) != codes.DeadlineExceeded, "%v", err)
	}
	ctx = metadata.AppendToOutgoingContext(soon(), "x-large", strings.Repeat("x", 4000))
	_, err = t.unary(ctx, "Unary", nil)
	ok(err, "4 kB")
}

func slowReader(t *test) {
	call := t.stream(soon(), "/test.Echo/ServerStream")
	ok(call.send([]byte("300 100000")), "send")
	ok(call.CloseSend(), "close")
	time.Sleep(300 * time.Millisecond)
	for number := 0; number < 300; number++ {
		unary, err := t.unary(soon(), "Unary", []byte("a"))
		check(err == nil && string(unary) == "a", "beside it: %v", err)
		answer, err := call.recv()
		ok(err, "recv")
		check(len(answer) == 100000 && answer[0] == byte(number), "message %d", number)
	}
}

func manyChannels(t *test) {
	together(50, func(index int) {
		conn := t.dial()
		defer conn.Close()
		for number := 0; number < 10; number++ {
			_, err := t.unaryOn(conn, soon(), "/test.Echo/Unary", []byte("a"))
			ok(err, "unary")
		}
	})
}

// keepaliveKept has the least interval that Go's client takes, 10 s.
func keepaliveKept(t *test) {
	t.conn = t.dial(grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 10 * time.Second, Timeout: time.Second}))
	call := t.stream(soon(), "/test.Echo/BidiStream")
	for round := 0; round < 2; round++ {
		call.echoed([]byte("a"))
		time.Sleep(11 * time.Second)
	}
	call.echoed([]byte("b"))
}

// idle pauses between calls for longer and longer, until the server has closed the connection between two of them.
func idle(t *test) {
	for pause := 0; pause < 12; pause++ {
		_, err := t.unary(soon(), "Unary", nil)
		ok(err, fmt.Sprint("after ", pause))
		time.Sleep(time.Duration(pause) * 150 * time.Millisecond)
	}
}

func refused(t *test) {
	ctx, end := context.WithTimeout(context.Background(), 3*time.Second)
	defer end()
	_, err := t.unary(ctx, "Unary", nil)
	isCode(err, codes.Unavailable, "unary")
}
