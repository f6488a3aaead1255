//go:build unix

package metrics

import (
	"io"
	"os"
	"syscall"
)

// turn sends the request and waits for the answer, within one wait of Go's poller: a read that should find nothing, a write,
// and a read when there is something. The first is the check that a kept connection is as it was left. To write and then
// to read takes as many system calls and checks nothing, since Go tries to read before it waits. It reports whether it is
// done; what is left of the request then is to be sent.
func (k *conn) turn(fd uintptr) bool {
	if k.request != nil {
		if k.used && !nothing(fd, k.in) {
			k.err = errStale
			return true
		}
		n, err := again(syscall.Write, fd, k.request)
		switch {
		case err == syscall.EAGAIN:
			return true
		case err != nil:
			k.err = os.NewSyscallError("write", err)
			return true
		case n < len(k.request):
			k.request = k.request[n:]
			return true
		}
		k.request = nil
		return false
	}
	n, err := again(syscall.Read, fd, k.in)
	switch {
	case err == syscall.EAGAIN:
		return false
	case err != nil:
		k.err = os.NewSyscallError("read", err)
	case n == 0:
		k.err = io.EOF
	default:
		k.n = n
	}
	return true
}

// quiet reports whether nothing has come over k, not even its end. What has is lost.
func (k *conn) quiet() (quiet bool) {
	var b [1]byte
	err := k.raw.Read(func(fd uintptr) bool {
		quiet = nothing(fd, b[:])
		return true
	})
	return quiet && err == nil
}

func nothing(fd uintptr, b []byte) bool {
	_, err := again(syscall.Read, fd, b)
	return err == syscall.EAGAIN
}

// again calls f until no signal interrupts it.
func again(f func(int, []byte) (int, error), fd uintptr, b []byte) (int, error) {
	for {
		if n, err := f(int(fd), b); err != syscall.EINTR {
			return n, err
		}
	}
}
