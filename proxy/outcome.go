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

// notYet stands for the outcome of an answer that may still end in any way.
const notYet = numOutcomes

// outcomes is the table of what each means: the word, the status a client gets (0: none of ours), OpenAI's error type, and a
// sentence for docs/outcomes.md. The word is also the error's code.
var outcomes = [numOutcomes]struct {
	word    string
	status  int
	typ     string
	meaning string
}{
	OK: {
		"ok", 0, "",
		"The server's answer was passed on to its end.",
	},
	BadRequest: {
		"bad_request", 400, "invalid_request_error",
		"The request can't be served as it is written: HTTP or JSON that parsers could read differently, no `model`, or longer than the context of every endpoint (the code is then `context_length_exceeded`, as with OpenAI). The message says which.",
	},
	Unauthorized: {
		"unauthorized", 401, "authentication_error",
		"`auth` is on, and the request has no key or token, or none that is valid.",
	},
	Forbidden: {
		"forbidden", 403, "permission_error",
		"The key or token is valid and may not use what was asked for.",
	},
	NotFound: {
		"not_found", 404, "invalid_request_error",
		"The path is none of the model APIs.",
	},
	ModelNotFound: {
		"model_not_found", 404, "invalid_request_error",
		"No endpoint serves the name in `model`, or the caller may not know that one does.",
	},
	MethodNotAllowed: {
		"method_not_allowed", 405, "invalid_request_error",
		"The path exists, for other methods: `Allow` lists them.",
	},
	RequestTimeout: {
		"request_timeout", 408, "invalid_request_error",
		"The client took longer to send the request than `timeouts.header` or `timeouts.body` allows.",
	},
	TooLarge: {
		"too_large", 413, "invalid_request_error",
		"The body is larger than `limits.body_bytes`.",
	},
	UnsupportedMediaType: {
		"unsupported_media_type", 415, "invalid_request_error",
		"The body is of a type or a content coding that kvgate can't read.",
	},
	HeadersTooLarge: {
		"headers_too_large", 431, "invalid_request_error",
		"The header is larger than `limits.header_bytes`.",
	},
	Quota: {
		"quota", 429, "rate_limit_error",
		"The caller has used up a quota; `Retry-After` says when there is more.",
	},
	Saturated: {
		"saturated", 429, "rate_limit_error",
		"There is no room: too many requests or body bytes are in flight (`limits`), or the queue of the pool's `admission` is full.",
	},
	QueueTimeout: {
		"queue_timeout", 429, "rate_limit_error",
		"The request waited for `admission` as long as it may, and no endpoint had room.",
	},
	NoEndpoints: {
		"no_endpoints", 503, "server_error",
		"No endpoint can take the request: all that serve the name are draining, asleep or not ready, or there are none.",
	},
	ShuttingDown: {
		"draining", 503, "server_error",
		"kvgate is stopping and takes no new request on a connection that was open. New connections are refused by then, which no outcome tells of.",
	},
	EndpointConnect: {
		"endpoint_connect", 502, "server_error",
		"No connection to the endpoint came about.",
	},
	EndpointReset: {
		"endpoint_reset", 502, "server_error",
		"The endpoint broke the connection off, or sent what is no HTTP, before the end of the answer.",
	},
	EndpointTimeout: {
		"endpoint_timeout", 504, "server_error",
		"The endpoint took longer than `timeouts.first_token`, `timeouts.idle` or `timeouts.total` allows.",
	},
	EndpointStatus: {
		"endpoint_status", 0, "",
		"The server answered with an error, which was passed on, status and all; or a stream carried one.",
	}, // as sent
	ClientGone: {
		"client_gone", 499, "",
		"The client closed its connection before the end of the answer. The status is 499, or the server's (200) once the head has gone.",
	}, // in logs only
	Internal: {
		"internal", 500, "server_error",
		"kvgate made a mistake; the log has it. Please report it.",
	},
}

// String returns the outcome's word.
func (o Outcome) String() string { return outcomes[o].word }

// Status returns the HTTP status that goes with o, 0 where it is the endpoint's own.
func (o Outcome) Status() int { return outcomes[o].status }

// ErrorType returns the error type, in OpenAI's words, of what the client is told.
func (o Outcome) ErrorType() string { return outcomes[o].typ }

// Meaning is a sentence on what o says, in Markdown.
func (o Outcome) Meaning() string { return outcomes[o].meaning }

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
	// code is the error's, where the APIs have a better word than the outcome's.
	code string
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
