package redisstore

import "syscall"

// A process that is stopped keeps its socket open and answers nothing.
const (
	stop   = syscall.SIGSTOP
	resume = syscall.SIGCONT
)
