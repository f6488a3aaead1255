package proxy

// An Outcome is how a request, or one attempt of it, ended: one closed list for logs, metrics, headers and error codes.
type Outcome uint8

// The outcomes.
const (
	OK Outcome = iota
	BadRequest
	Unauthorized
	Forbidden
	NotFound
	ModelNotFound
	MethodNotAllowed
	RequestTimeout
	TooLarge
	UnsupportedMediaType
	HeadersTooLarge
	Quota
	Saturated
	QueueTimeout
	NoEndpoints
	ShuttingDown
	EndpointConnect
	EndpointReset
	EndpointTimeout
	EndpointStatus
	ClientGone
	Internal
	numOutcomes
)

// outcomes is the table of what each means: the word, the status a client gets (0: none of ours), and OpenAI's error
// type. The word is also the error's code.
var outcomes = [numOutcomes]struct {
	word   string
	status int
	typ    string
}{
	OK:                   {"ok", 0, ""},
	BadRequest:           {"bad_request", 400, "invalid_request_error"},
	Unauthorized:         {"unauthorized", 401, "authentication_error"},
	Forbidden:            {"forbidden", 403, "permission_error"},
	NotFound:             {"not_found", 404, "invalid_request_error"},
	ModelNotFound:        {"model_not_found", 404, "invalid_request_error"},
	MethodNotAllowed:     {"method_not_allowed", 405, "invalid_request_error"},
	RequestTimeout:       {"request_timeout", 408, "invalid_request_error"},
	TooLarge:             {"too_large", 413, "invalid_request_error"},
	UnsupportedMediaType: {"unsupported_media_type", 415, "invalid_request_error"},
	HeadersTooLarge:      {"headers_too_large", 431, "invalid_request_error"},
	Quota:                {"quota", 429, "rate_limit_error"},
	Saturated:            {"saturated", 429, "rate_limit_error"},
	QueueTimeout:         {"queue_timeout", 429, "rate_limit_error"},
	NoEndpoints:          {"no_endpoints", 503, "server_error"},
	ShuttingDown:         {"draining", 503, "server_error"},
	EndpointConnect:      {"endpoint_connect", 502, "server_error"},
	EndpointReset:        {"endpoint_reset", 502, "server_error"},
	EndpointTimeout:      {"endpoint_timeout", 504, "server_error"},
	EndpointStatus:       {"endpoint_status", 0, ""}, // as sent
	ClientGone:           {"client_gone", 499, ""},   // in logs only
	Internal:             {"internal", 500, "server_error"},
}

// String returns the outcome's word.
func (o Outcome) String() string { return outcomes[o].word }

// Status returns the HTTP status that goes with o, 0 where it is the endpoint's own.
func (o Outcome) Status() int { return outcomes[o].status }

// ErrorType returns the error type, in OpenAI's words, of what the client is told.
func (o Outcome) ErrorType() string { return outcomes[o].typ }

// Outcomes yields every outcome, for documentation and tests that hold others to the list.
func Outcomes(yield func(Outcome) bool) {
	for o := range numOutcomes {
		if !yield(o) {
			return
		}
	}
}

// outcomeOf returns the outcome with this word; Internal if there is none.
func outcomeOf(word string) Outcome {
	for o := range numOutcomes {
		if outcomes[o].word == word {
			return o
		}
	}
	return Internal
}

// A failure is why a request, or an attempt, did not end well. It carries the three facts a retry asks for: what it was,
// who is to blame (the outcome says so), and whether the endpoint can have done any work.
type failure struct {
	outcome Outcome
	// message is for the client: it names what to do, and never an address. It is logged where err is nil: if it holds
	// anything that a client or an endpoint wrote, other than a model's name or a path, err says the same without that.
	message string
	// param is the request field that is to blame, if one is.
	param string
	// err is for operators.
	err error
	// unexecuted: the endpoint surely did nothing for the request.
	unexecuted bool
	// unanswered: the request was written and the connection ended without a byte of answer.
	unanswered bool
	// adapterGone: the endpoint has lost the request's adapter, which can be loaded again.
	adapterGone bool
	// status is the endpoint's status where outcome is EndpointStatus.
	status int
	// retryAfterSeconds is what a client is told to wait; 0: not told.
	retryAfterSeconds int
	// allow is the Allow header of a 405.
	allow string
	// closing: the connection to the client cannot be used again.
	closing bool
}

// Error implements error.
func (f *failure) Error() string {
	if f.err != nil {
		return f.outcome.String() + ": " + f.err.Error()
	}
	return f.outcome.String() + ": " + f.message
}

// Unwrap returns the cause.
func (f *failure) Unwrap() error { return f.err }
