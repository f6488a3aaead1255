//go:build linux && !race

package proxy

import (
	"syscall"
	"unsafe"
)

// Sockets don't block, so that neither call has to be announced to the scheduler, as syscall.Read and Write do: that costs
// some percent of a small request, and has the runtime's monitor take the processor away from who is in a long write.

// readNow reads what is there.
func readNow(fd int, p []byte) (int, error) {
	return now(syscall.RawSyscall(syscall.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p))))
}

// writeNow writes what there is room for.
func writeNow(fd int, p []byte) (int, error) {
	return now(syscall.RawSyscall(syscall.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p))))
}

// writeBothNow writes p and then q, as far as there is room.
func writeBothNow(fd int, p, q []byte) (int, error) {
	v := [2]syscall.Iovec{{Base: unsafe.SliceData(p)}, {Base: unsafe.SliceData(q)}}
	v[0].SetLen(len(p))
	v[1].SetLen(len(q))
	return now(syscall.RawSyscall(syscall.SYS_WRITEV, uintptr(fd), uintptr(unsafe.Pointer(&v)), 2))
}

// nothingToRead reports whether the peer has neither sent a byte nor closed.
func nothingToRead(fd int) bool {
	var b [1]byte
	_, _, e := syscall.RawSyscall6(syscall.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b)), 1, syscall.MSG_PEEK|syscall.MSG_DONTWAIT, 0, 0)
	return e == syscall.EAGAIN
}

func now(n, _ uintptr, e syscall.Errno) (int, error) {
	switch e {
	case 0:
		return int(n), nil
	case syscall.EAGAIN:
		return 0, errAgain
	}
	return 0, e
}

var errAgain error = syscall.EAGAIN // as the interface, so that it costs no allocation
