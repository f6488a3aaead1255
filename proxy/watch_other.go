//go:build !linux

package proxy

// A watcher learns when clients go. Without epoll it learns nothing by itself: a
// client's going is noticed when writing to it fails.
type watcher struct{}

func newWatcher(bool) (*watcher, error) { return &watcher{}, nil }

func (w *watcher) registerClient(*clientConn) bool     { return false }
func (w *watcher) registerEndpoint(*endpointConn) bool { return false }
func (w *watcher) unregister(*watchState)              {}
func (w *watcher) close()                              {}
