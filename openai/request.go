package openai

import (
	"errors"
	"strconv"
)

// A Range is the part [Start, End) of a body, in bytes. The zero Range means that
// there is no such part.
type Range struct{ Start, End int }

// Len returns the number of bytes of g.
func (g Range) Len() int { return g.End - g.Start }

// Of returns the bytes of body that g covers.
func (g Range) Of(body []byte) []byte { return body[g.Start:g.End] }

// MaxPromptRanges is the most parts a prompt is made of.
const MaxPromptRanges = 8

// Facts is what Peek and PeekMultipart find in a body. Byte slices alias the body
// or the Request's own memory: they are valid until either is used again.
//
// An optional field that is absent or null leaves its zero value.
type Facts struct {
	API API

	Model      []byte // unescaped; empty only where the API allows it to be absent
	ModelRange Range  // the value as it stands in the body, with its quotes in JSON and without in a form

	Stream      bool
	StreamRange Range // the value of "stream", if it is there

	// MaxTokens bounds the output tokens per choice; max_completion_tokens wins
	// over max_tokens. It means something only if HasMaxTokens.
	MaxTokens    int
	HasMaxTokens bool
	N, BestOf    int // as sent; 0 if absent. See Choices

	// Prompt holds the parts of the body that the server turns into prompt tokens
	// (so those that decide about prefix cache hits), in the order in which chat
	// templates write them, whatever their order in the body: tools, documents,
	// system text, and last the messages, prompt or input. Only the first
	// PromptRanges entries are set. See Prompts.
	Prompt         [MaxPromptRanges]Range
	PromptRanges   int
	PromptIsTokens bool // the last part is an array of token ids, or an array of such arrays
	PromptTokens   int  // number of token ids if PromptIsTokens, else 0

	CacheSalt []byte // cache_salt: unescaped if a string, else the raw JSON (SGLang takes lists)
	ExtraKey  []byte // extra_key (SGLang): as CacheSalt

	PromptCacheKey     []byte
	PreviousResponseID []byte
	SessionID          []byte // session_id (vLLM), else session_params.id (SGLang)
	User               []byte // user, or metadata.user_id of Messages
	Priority           int    // as sent; servers disagree on whether less is sooner
	HasPriority        bool

	StreamOptionsRange Range // the object, if there is one
	IncludeUsage       bool  // stream_options.include_usage
	IncludeUsageRange  Range // its value, if it is there

	Background bool
	Store      bool
	HasStore   bool // OpenAI's default for store is true, so absence is told apart

	promptFields      [MaxPromptRanges]field
	bodyEnd           int   // index of the object's closing brace
	streamOptionsNull Range // the null at stream_options, if it is there
	multipart         bool  // ModelRange is the content of a form field
}

// Prompts returns the parts of the prompt, in order; see Facts.Prompt.
func (r *Facts) Prompts() []Range { return r.Prompt[:r.PromptRanges] }

// PromptBytes returns the summed length of the parts of the prompt.
func (r *Facts) PromptBytes() int {
	n := 0
	for _, g := range r.Prompts() {
		n += g.Len()
	}
	return n
}

// Choices returns how many answers the server generates: n, or best_of where it
// is larger, and at least 1.
func (r *Facts) Choices() int { return max(1, r.N, r.BestOf) }

// A Request holds what Peek finds in a body, and the memory that it needs for it,
// so that a Request that is used again doesn't allocate. It may be copied only as
// Facts. The zero Request is ready for use. Not safe for concurrent use.
type Request struct {
	Facts

	text []byte    // unescaped strings that Facts refers to
	key  []byte    // the last escaped key, unescaped
	keys [64]keyID // keys that no field of Facts has, for finding duplicates
	more []keyID   // the 65th and further ones
	nKey int       // number of entries used in keys
}

// A keyID is a key of the top-level object, and a hash of its unescaped form.
type keyID struct {
	hash       uint64
	start, end int // between the quotes
}

// Memory that a Request may keep for its next use.
const (
	keepTextBytes = 4 << 10
	keepKeys      = 64
)

// Reset forgets what was found. It keeps memory for the next body, but only as
// much as an ordinary body needs.
func (r *Request) Reset() {
	r.Facts = Facts{}
	r.nKey = 0
	r.text, r.key, r.more = r.text[:0], r.key[:0], r.more[:0]
	if cap(r.text)+cap(r.key) > keepTextBytes {
		r.text, r.key = nil, nil
	}
	if cap(r.more) > keepKeys {
		r.more = nil
	}
}

// ErrModelMissing is wrapped by the error for a body without the model that its
// API needs.
var ErrModelMissing = errors.New("model is missing")

// A BodyError says what is wrong with a body and where. Its answer to the client
// is status 400 with Error() as message and Field as param.
type BodyError struct {
	Offset  int    // bytes into the body
	Field   string // top-level key or form field, empty if none is to blame
	Message string // for the client: what, where, and what to send instead
	quiet   string // Message without what it quotes of the body; "" if it quotes nothing
	err     error
}

// Error returns the message for the client.
func (e *BodyError) Error() string { return e.Message }

// LogText returns the message for a log, in which nothing that a client wrote may be.
func (e *BodyError) LogText() string {
	if e.quiet != "" {
		return e.quiet
	}
	return e.Message
}

// Unwrap returns ErrModelMissing if that is what is wrong.
func (e *BodyError) Unwrap() error { return e.err }

func syntaxError(f fault, at int) *BodyError {
	return &BodyError{Offset: at, Message: "invalid JSON at byte " + strconv.Itoa(at) + ": " + faultMessages[f]}
}

func fieldError(field string, at int, what string) *BodyError {
	return &BodyError{Offset: at, Field: field, Message: field + " at byte " + strconv.Itoa(at) + ": " + what}
}
