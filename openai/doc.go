// Package openai knows the wire formats that clients and model servers speak
// (OpenAI's, Anthropic's Messages, and the rerank, pooling and tokenize family
// around them): which paths exist, what a gateway must read from a request body,
// what a stream of server-sent events or a JSON answer says about tokens and
// errors, and how an error is written in each API's own shape.
//
// It reads bytes and never changes them: bodies are looked at in one pass,
// without decoding and without allocation, and spliced only where SpliceModel or
// SpliceIncludeUsage is asked to.
//
// It imports no network and no logging package and reads no clock; it imports
// nothing of kvgate's.
package openai
