package main

import (
	"bytes"
	"encoding/hex"
	"fmt"
	"io/ioutil"
	"os"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc"
)

// load calls, eight at a time, until standard input ends; says "running" once 100 calls are answered. No call may fail:
// calls wait for a connection, and one that a server has not begun is sent again. With "path" and "request" (in
// hexadecimal) it calls another method, and does not look at the answer.
func load(t *test) {
	var isOver, answered int32
	go func() {
		ioutil.ReadAll(os.Stdin)
		atomic.StoreInt32(&isOver, 1)
	}()
	path := "/test.Echo/Unary"
	fixed, _ := hex.DecodeString(t.arguments["request"])
	if t.arguments["path"] != "" {
		path = t.arguments["path"]
	}
	errors := map[string]int{}
	var mutex sync.Mutex
	together(8, func(index int) {
		for number := 0; atomic.LoadInt32(&isOver) == 0; number++ {
			request := bytes.Repeat([]byte{byte(index), byte(number)}, 50)
			if path != "/test.Echo/Unary" {
				request = fixed
			}
			answer, err := t.unaryOn(t.conn, soon(), path, request, grpc.WaitForReady(true))
			if err == nil && path == "/test.Echo/Unary" && !bytes.Equal(answer, request) {
				err = fmt.Errorf("another's answer")
			}
			if err != nil {
				mutex.Lock()
				errors[err.Error()]++
				mutex.Unlock()
			}
			if atomic.AddInt32(&answered, 1) == 100 {
				fmt.Println("running")
			}
		}
	})
	fmt.Println(answered, "calls")
	check(len(errors) == 0, "of %d calls: %v", answered, errors)
}
