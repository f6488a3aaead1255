//go:build unix

package gateway

import (
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"kvgate/config"
)

// A log file that is a pipe which nobody reads is an error, and not waited for.
func TestLogToAPipe(t *testing.T) {
	name := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(name, 0o600); err != nil {
		t.Skip(err)
	}
	if _, err := newLogs(&config.Log{Level: "info", Format: "json", File: name}, &syncBuffer{}); err == nil || !strings.Contains(err.Error(), "log.file") {
		t.Errorf("%v; want an error about log.file", err)
	}
}
