//go:build unix && (!linux || race)

package proxy

import "syscall"

// The race detector takes what syscall.Read gets for having happened after what syscall.Write wrote, anywhere.

func readNow(fd int, p []byte) (int, error) {
	n, err := syscall.Read(fd, p)
	return max(n, 0), err
}

func writeNow(fd int, p []byte) (int, error) {
	n, err := syscall.Write(fd, p)
	return max(n, 0), err
}

func writeBothNow(fd int, p, q []byte) (int, error) {
	n, err := writeNow(fd, p)
	if n == len(p) && err == nil {
		var m int
		m, err = writeNow(fd, q)
		n += m
	}
	return n, err
}

func nothingToRead(fd int) bool {
	var b [1]byte
	_, _, err := syscall.Recvfrom(fd, b[:], syscall.MSG_PEEK|syscall.MSG_DONTWAIT)
	return err == syscall.EAGAIN
}
