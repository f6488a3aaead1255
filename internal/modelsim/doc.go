// Package modelsim is a model server that behaves like vLLM without a GPU. It
// serves the demo, the tests and the policy comparison.
//
// [Engine] is the model itself: vLLM V1's scheduler, paged KV cache, prefix
// cache and adapter slots, with step times from measured tables. It is pure:
// no goroutine, no wall clock, no randomness; time is an argument, so the same
// engine runs in virtual time over a million requests and behind sockets.
//
// [Server] puts one Engine behind vLLM's or SGLang's HTTP surface in real time,
// with knobs for every way we know a model server to fail.
//
// The package must not import any other package of kvgate: what it speaks is
// the model servers' contract, not ours, and a shared misreading would hide in
// every test built on it.
package modelsim
