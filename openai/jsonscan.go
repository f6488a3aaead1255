package openai

// A JSONScan reads along a JSON answer that isn't streamed, cut anywhere, and
// finds what it says about tokens, its id, how it ended and whether it is an
// error, wherever these stand in however many megabytes. It changes and keeps
// nothing and doesn't allocate. The zero JSONScan is ready for use. Not safe for
// concurrent use; don't copy one.
type JSONScan struct {
	w     walker
	begun bool
}

// Reset makes j ready for the next answer.
func (j *JSONScan) Reset() {
	j.w.keepID, j.w.keepError = false, false
	j.w.start(objRoot)
	j.begun = true
}

// Feed reads the next bytes of the answer.
func (j *JSONScan) Feed(p []byte) {
	if !j.begun {
		j.Reset()
	}
	j.w.feed(p)
}

// Complete reports whether the whole JSON value has been read. What a JSONScan
// says is worth little before that.
func (j *JSONScan) Complete() bool { return j.w.state == lexEnd }

// Usage returns the token counts: usage in all its spellings, or what TGI, SGLang,
// Ollama and llama.cpp have in its place.
func (j *JSONScan) Usage() Usage { return j.w.usage.usage() }

// Timings returns the counts in llama.cpp's timings.
func (j *JSONScan) Timings() Usage { return j.w.usage.timings() }

// ID returns the answer's id, or nil; it is valid until the next Feed or Reset.
func (j *JSONScan) ID() []byte {
	if j.w.id.n == 0 {
		return nil
	}
	return j.w.id.get()
}

// FinishReason returns the last finish_reason or stop_reason, or else the status
// of a response, or the first one that says that the answer was cut off. It
// allocates.
func (j *JSONScan) FinishReason() string {
	if j.w.finish.n > 0 {
		return string(j.w.finish.get())
	}
	return string(j.w.status.get())
}

// CutOff reports whether the server gave up on the answer.
func (j *JSONScan) CutOff() bool { return isCutOff(j.w.finish.get()) || isCutOff(j.w.status.get()) }

// Failed reports whether the answer is, or contains, an error.
func (j *JSONScan) Failed() bool { return j.w.isError() || j.w.flags&sawDetail != 0 }

// Error returns what the error says. It allocates. Where the whole body is at
// hand ParseError says more.
func (j *JSONScan) Error() ErrorInfo {
	if !j.Failed() {
		return ErrorInfo{}
	}
	return j.w.errorInfo()
}
