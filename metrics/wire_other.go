//go:build !unix

package metrics

// turn leaves all of it to converse.
func (k *conn) turn(uintptr) bool { return true }

// quiet knows nothing to the contrary: a request that meets the end of its connection is sent again.
func (k *conn) quiet() bool { return true }
