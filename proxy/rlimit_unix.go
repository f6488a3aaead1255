//go:build unix

package proxy

import "golang.org/x/sys/unix"

// defaultConnections is how many client connections the descriptors suffice for: each
// request needs one more, to its endpoint.
func defaultConnections() int {
	var r unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &r); err != nil || r.Cur > 1<<20 {
		return 1 << 19
	}
	return max(16, (int(r.Cur)-reservedDescriptors)/2)
}
