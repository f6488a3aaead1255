//go:build !unix

package proxy

// defaultConnections is how many client connections are served at a time.
func defaultConnections() int { return 1 << 14 }
