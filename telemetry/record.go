package telemetry

// A Record is one finished request: what the access log writes and what the metrics count. The proxy fills one per
// request and hands it over exactly once, when the booking has been released and the last byte has gone out.
//
// Strings may alias buffers of the request: whoever receives a Record keeps nothing of it after returning, and copies
// what it wants to keep. That lets the proxy use one Record per connection and allocate nothing.
type Record struct {
	RequestID  string // X-Request-Id, the client's or ours
	Method     string
	Path       string // as it was routed, without the query; what the client wrote if it matched no route
	API        string // openai.API's name; "" if the path is none
	ClientAddr string // host:port of the peer

	Status  int    // sent to the client; 499 if it went away before one was
	Outcome string // one word of the closed list
	Error   string // why, for operators; "" when all went well. It may name addresses; it never holds bodies or keys

	Pool    string // "" when the model was not resolved
	Model   string // as the client named it; "" if it named none
	Adapter string // the LoRA adapter that Model stands for, or ""
	Served  string // what the model is called at the endpoints; "" if it was not resolved

	Tenant string // of the credential; "" with authentication off
	Key    string // the name of the credential, which is no secret

	// Endpoint is the pool.Endpoint.ID that answered, or the last one tried; "" if none was.
	Endpoint string
	// Attempts are the tries in order, one per endpoint. The last one's outcome is the request's.
	Attempts []Attempt

	Stream bool // the client asked for a stream

	// What the request's body said of itself; 0 or nil where it said nothing, or was not looked at.
	PromptBytes int64
	MaxTokens   int64    // of the answer, that it allowed
	Session     uint64   // hash of what it names the session by
	Prefix      []uint64 // hashes of the prompt's blocks, see scoring.HashPrefix; lent like the strings

	QueueSeconds    float64 // waited for admission; 0 if it went straight through
	DecisionSeconds float64 // spent choosing, over all attempts
	TTFTSeconds     float64 // from the request's last byte to the answer's first token, waiting included; 0 if there was none or it is not streamed
	DurationSeconds float64 // from the request's first byte to the answer's last one

	// Where that time went, each counted from the request's first byte; 0 if it did not get that far.
	ReadSeconds      float64 // the request had been read
	SentSeconds      float64 // it had been written to the endpoint that answered, or to the last one tried
	FirstByteSeconds float64 // the first token came, or the first byte of an answer that shows none

	// OverheadSeconds is the gateway's own time until the request was on its way: from its last byte read to its last byte
	// written, without waits for admission, for connections and for endpoints that were tried before. 0 if it was not sent.
	OverheadSeconds float64

	UsageKnown   bool // the answer told its usage; otherwise the three token counts mean nothing
	CachedKnown  bool // the answer told how much of the prompt came from the prefix cache
	InputTokens  int64
	OutputTokens int64
	CachedTokens int64 // part of InputTokens

	BytesIn  int64 // request body
	BytesOut int64 // response body

	// Decided reports whether an endpoint was chosen; otherwise the fields below mean nothing. They are of the last
	// decision, so that anyone can ask later what the router knew.
	Decided          bool
	Cost             float64 // the policy's figure for the chosen endpoint; prefill tokens for auto, the total for weights
	RunnerUp         string  // the second best endpoint's ID; "" if there was none
	RunnerUpCost     float64
	SnapshotVersion  uint64
	ScrapeAgeSeconds float64 // age of the chosen endpoint's load; negative if it was never scraped
	PromptTokens     int64   // estimated, uncapped
	NewTokens        int64   // of them, expected not to be in the endpoint's prefix cache
	PredictedSeconds float64 // from sending the request to the first token of its answer, as predicted; 0 is unknown
	AnsweredSeconds  float64 // the same as it was; 0 if it was not seen
	AdapterResident  bool    // the adapter was believed to be loaded there

	Trace TraceContext // of a distributed trace; zero where there is none
	// Explained is the number under which the explanation of the first decision was kept; 0 if none was.
	Explained uint64
}

// An Attempt is one try of a request against one endpoint.
type Attempt struct {
	Endpoint string // pool.Endpoint.ID
	Outcome  string // one word of the closed list
	Seconds  float64
}

// A Sink takes finished requests. It is called by many goroutines at once, must return within microseconds and keeps
// nothing of r; see [Record].
type Sink interface {
	Observe(r *Record)
}

// Sinks hands a record to several sinks, in order.
type Sinks []Sink

// Observe implements [Sink].
func (s Sinks) Observe(r *Record) {
	for _, sink := range s {
		sink.Observe(r)
	}
}
