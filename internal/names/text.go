package names

import "unsafe"

// text makes a string of bytes that stay as they are while it is used.
func text(b []byte) string { return unsafe.String(unsafe.SliceData(b), len(b)) }
