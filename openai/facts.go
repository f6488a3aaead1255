package openai

// An object is a kind of JSON object (or array) whose members mean something to
// us.
type object uint8

const (
	objUnknown  object = iota
	objRoot            // a whole answer or event
	objError           // error
	objUsage           // usage
	objCached          // usage.prompt_tokens_details and the like
	objResponse        // response, in events of the Responses API
	objMessage         // message, in message_start of the Messages API
	objDelta           // delta, in message_delta of the Messages API
	objChoices         // choices, an array
	objChoice          // choices[i]
	objFinish          // finish_reason, where it is an object (SGLang)
	objMeta            // meta_info (SGLang)
	objDetails         // details (TGI)
	objTimings         // timings (llama.cpp)
)

// A member is a member of such an object.
type member uint8

const (
	mNone member = iota
	mRoot
	mChoice

	mID
	mType
	mObject
	mError
	mErrorType
	mCode
	mHTTPStatus
	mMessage
	mDetail
	mUsage
	mUsageDetails
	mPromptTokens
	mCompletionTokens
	mInputTokens
	mOutputTokens
	mTotalTokens
	mCachedTokens
	mCacheRead
	mCacheCreation
	mResponse
	mStatus
	mDelta
	mStopReason
	mChoices
	mFinish
	mMeta
	mDetails
	mTimings
	mCacheN
	mPromptN
	mPredictedN
	mStop
	mDone
	mOutput // its presence means that output has begun
)

// memberOf returns what the key means in an object of kind o.
func memberOf(o object, key []byte) member {
	switch o {
	case objRoot:
		switch string(key) {
		case "id", "request_id":
			return mID
		case "type":
			return mType
		case "object":
			return mObject
		case "choices":
			return mChoices
		case "usage":
			return mUsage
		case "error":
			return mError
		case "error_type":
			return mErrorType
		case "code":
			return mCode
		case "message":
			return mMessage
		case "detail":
			return mDetail
		case "response":
			return mResponse
		case "status":
			return mStatus
		case "delta":
			return mDelta
		case "stop_reason":
			return mStopReason
		case "meta_info":
			return mMeta
		case "details":
			return mDetails
		case "timings":
			return mTimings
		case "stop_type", "done_reason":
			return mFinish
		case "stop":
			return mStop
		case "done":
			return mDone
		case "tokens_evaluated", "prompt_eval_count":
			return mPromptTokens
		case "tokens_predicted", "eval_count":
			return mCompletionTokens
		case "text", "content", "token", "output_ids":
			return mOutput
		}
	case objChoice:
		if string(key) == "finish_reason" {
			return mFinish
		}
	case objUsage:
		switch string(key) {
		case "prompt_tokens":
			return mPromptTokens
		case "completion_tokens":
			return mCompletionTokens
		case "total_tokens":
			return mTotalTokens
		case "input_tokens":
			return mInputTokens
		case "output_tokens":
			return mOutputTokens
		case "cache_read_input_tokens":
			return mCacheRead
		case "cache_creation_input_tokens":
			return mCacheCreation
		case "prompt_cache_hit_tokens": // DeepSeek
			return mCachedTokens
		case "prompt_tokens_details", "input_tokens_details":
			return mUsageDetails
		}
	case objCached:
		if string(key) == "cached_tokens" {
			return mCachedTokens
		}
	case objError:
		switch string(key) {
		case "code":
			return mCode
		case "type":
			return mErrorType
		case "message":
			return mMessage
		case "http_status_code": // TGI
			return mHTTPStatus
		}
	case objResponse:
		switch string(key) {
		case "id":
			return mID
		case "status":
			return mStatus
		case "error":
			return mError
		case "usage":
			return mUsage
		}
	case objMessage:
		switch string(key) {
		case "id":
			return mID
		case "usage":
			return mUsage
		}
	case objDelta:
		if string(key) == "stop_reason" {
			return mStopReason
		}
	case objFinish:
		if string(key) == "type" {
			return mFinish
		}
	case objMeta:
		switch string(key) {
		case "id":
			return mID
		case "finish_reason":
			return mFinish
		case "prompt_tokens":
			return mPromptTokens
		case "completion_tokens":
			return mCompletionTokens
		case "cached_tokens":
			return mCachedTokens
		}
	case objDetails:
		switch string(key) {
		case "finish_reason":
			return mFinish
		case "generated_tokens":
			return mCompletionTokens
		case "input_length":
			return mPromptTokens
		}
	case objTimings:
		switch string(key) {
		case "cache_n":
			return mCacheN
		case "prompt_n":
			return mPromptN
		case "predicted_n":
			return mPredictedN
		}
	}
	return mNone
}

// A label is a short text in fixed memory; what doesn't fit is cut.
type label struct {
	n    uint8
	text [63]byte
}

func (l *label) set(s []byte) { l.n = uint8(copy(l.text[:], s)) }
func (l *label) get() []byte  { return l.text[:l.n] }

// A longLabel is a label for ids and messages.
type longLabel struct {
	n    uint8
	text [127]byte
}

func (l *longLabel) set(s []byte) { l.n = uint8(copy(l.text[:], s)) }
func (l *longLabel) get() []byte  { return l.text[:l.n] }

// An eventType is what the type of an event (or of an answer) says.
type eventType uint8

const (
	typeNone eventType = iota
	typeOther
	typeError
	typeDelta // some output: *.delta, content_block_*, message_start, message_delta
	typeCompleted
	typeFailed
	typeIncomplete
	typeMessageStop
	typeTranscriptDone
)

// typeOf classifies the type of an event. response.created, response.in_progress
// and the like come before the first token and are typeOther, as is ping.
func typeOf(s []byte) eventType {
	switch string(s) {
	case "error":
		return typeError
	case "message_start", "content_block_start", "content_block_delta", "content_block_stop", "message_delta":
		return typeDelta
	case "message_stop":
		return typeMessageStop
	case "response.completed":
		return typeCompleted
	case "response.failed":
		return typeFailed
	case "response.incomplete":
		return typeIncomplete
	case "transcript.text.done":
		return typeTranscriptDone
	}
	if n := len(s) - len(".delta"); n > 0 && string(s[n:]) == ".delta" {
		return typeDelta
	}
	return typeOther
}

// Flags of facts.
const (
	sawError       = 1 << iota // error is there, and not null
	sawErrorObject             // "object":"error"
	sawDetail                  // detail is there
	sawChoice                  // choices has an element
	sawOutput                  // some other member that carries output
	sawErrorText               // error is a string
	sawEnd                     // the server's own mark of the last event, where it has one
)

// Indices of usageFields.v.
const (
	uPrompt = iota // includes cached tokens
	uCompletion
	uInput // includes cached tokens, unless uCacheRead or uCacheCreation are there
	uOutput
	uTotal
	uCached
	uCacheRead
	uCacheCreation
	uTimingCached
	uTimingPrompt
	uTimingPredicted
	numUsage
)

// usageFields are the token counts that were seen.
type usageFields struct {
	has uint16
	v   [numUsage]int64
}

// merge overwrites the counts of u by those that v has: streams report cumulative
// counts, so the last one is the sum.
func (u *usageFields) merge(v *usageFields) {
	for i := range u.v {
		if v.has&(1<<i) != 0 {
			u.v[i] = v.v[i]
		}
	}
	u.has |= v.has
}

func (u *usageFields) get(i int) (int64, bool) { return u.v[i], u.has&(1<<i) != 0 }

// Usage is what an answer says about tokens. A count that the server didn't
// report is unknown, not 0.
type Usage struct {
	InputTokens  int64 // prompt tokens, cached ones included
	OutputTokens int64 // generated tokens
	CachedTokens int64 // prompt tokens that came from the prefix cache
	HasInput     bool
	HasOutput    bool
	HasCached    bool
}

// usage makes one Usage of the spellings of all APIs.
func (u *usageFields) usage() (r Usage) {
	r.CachedTokens, r.HasCached = u.get(uCached)
	read, hasRead := u.get(uCacheRead)
	created, _ := u.get(uCacheCreation)
	if hasRead && !r.HasCached {
		r.CachedTokens, r.HasCached = read, true
	}
	if r.InputTokens, r.HasInput = u.get(uPrompt); !r.HasInput {
		// Anthropic's input_tokens leave out what was read from or written to the cache.
		r.InputTokens, r.HasInput = u.get(uInput)
		r.InputTokens += read + created
	}
	if r.OutputTokens, r.HasOutput = u.get(uCompletion); !r.HasOutput {
		r.OutputTokens, r.HasOutput = u.get(uOutput)
	}
	// Rerankers report a total only, and generate nothing.
	if total, ok := u.get(uTotal); ok && !r.HasInput && !r.HasOutput {
		r.InputTokens, r.HasInput = total, true
	}
	return r
}

// timings makes a Usage of llama.cpp's timings, which are there without usage.
func (u *usageFields) timings() (r Usage) {
	r.CachedTokens, r.HasCached = u.get(uTimingCached)
	r.InputTokens, r.HasInput = u.get(uTimingPrompt)
	r.InputTokens += r.CachedTokens
	r.OutputTokens, r.HasOutput = u.get(uTimingPredicted)
	return r
}

// facts are what one event or answer says.
type facts struct {
	flags uint8
	typ   eventType
	// keepID and keepError freeze id and the error's text once an event that has
	// them is complete; the first ones count.
	keepID, keepError bool

	httpStatus int
	usage      usageFields

	id       longLabel
	message  longLabel // of an error
	code     label
	errType  label
	rootType label
	finish   label
	status   label
}

// reset makes f ready for the next event.
func (f *facts) reset() {
	f.flags, f.typ = 0, typeNone
	f.usage.has = 0
	f.rootType.n, f.finish.n, f.status.n = 0, 0, 0
	if !f.keepID {
		f.id.n = 0
	}
	if !f.keepError {
		f.httpStatus = 0
		f.message.n, f.code.n, f.errType.n = 0, 0, 0
	}
}

// isError reports whether f describes an error.
func (f *facts) isError() bool {
	return f.flags&(sawError|sawErrorObject) != 0 || f.typ == typeError || f.typ == typeFailed
}

// str takes a string: s is member m of an object of kind o.
func (f *facts) str(o object, m member, s []byte) {
	switch m {
	case mID:
		// An id that doesn't fit is of no use.
		if !f.keepID && (f.id.n == 0 || o != objRoot) && len(s) <= len(f.id.text) {
			f.id.set(s)
		}
	case mType:
		f.typ = typeOf(s)
		f.rootType.set(s)
	case mObject:
		if string(s) == "error" {
			f.flags |= sawErrorObject
		}
	case mError:
		if len(s) > 0 {
			f.flags |= sawError | sawErrorText
			f.setMessage(s)
		}
	case mErrorType:
		if !f.keepError {
			f.errType.set(s)
		}
	case mCode:
		f.setCode(s)
	case mMessage:
		f.setMessage(s)
	case mDetail:
		f.flags |= sawDetail
		f.setMessage(s)
	case mStatus:
		f.status.set(s)
	case mStopReason, mFinish:
		if !isCutOff(f.finish.get()) {
			f.finish.set(s)
		}
	case mResponse, mOutput:
		f.flags |= sawOutput
	}
}

func (f *facts) setMessage(s []byte) {
	if !f.keepError {
		f.message.set(s)
	}
}

func (f *facts) setCode(s []byte) {
	if !f.keepError {
		f.code.set(s)
	}
}

// scalar takes a number or a literal.
func (f *facts) scalar(_ object, m member, s []byte) {
	switch s[0] {
	case 'n':
		return
	case 't', 'f':
		yes := s[0] == 't'
		switch {
		case m == mDone:
			f.flags |= sawOutput
			if yes {
				f.flags |= sawEnd
			}
		case m == mStop && yes:
			f.flags |= sawEnd
		case m == mError && yes:
			f.flags |= sawError
		}
		return
	}
	switch m {
	case mError:
		f.flags |= sawError
	case mCode:
		f.setCode(s)
	case mHTTPStatus:
		if n, ok := count(s); ok && !f.keepError {
			f.httpStatus = int(n)
		}
	case mPromptTokens:
		f.setCount(uPrompt, s)
	case mCompletionTokens:
		f.setCount(uCompletion, s)
	case mInputTokens:
		f.setCount(uInput, s)
	case mOutputTokens:
		f.setCount(uOutput, s)
	case mTotalTokens:
		f.setCount(uTotal, s)
	case mCachedTokens:
		f.setCount(uCached, s)
	case mCacheRead:
		f.setCount(uCacheRead, s)
	case mCacheCreation:
		f.setCount(uCacheCreation, s)
	case mCacheN:
		f.setCount(uTimingCached, s)
	case mPromptN:
		f.setCount(uTimingPrompt, s)
	case mPredictedN:
		f.setCount(uTimingPredicted, s)
	}
}

func (f *facts) setCount(i int, s []byte) {
	if n, ok := count(s); ok {
		f.usage.v[i] = n
		f.usage.has |= 1 << i
	}
}

// count returns the value of a plain decimal number of at most 15 digits: more
// tokens than that nobody has.
func count(s []byte) (n int64, ok bool) {
	if len(s) == 0 || len(s) > 15 {
		return 0, false
	}
	for _, c := range s {
		if c < '0' || c > '9' {
			return 0, false
		}
		n = n*10 + int64(c-'0')
	}
	return n, true
}

// open takes the beginning of an array or object and says what its members mean.
func (f *facts) open(o object, m member, c byte) object {
	switch m {
	case mOutput:
		f.flags |= sawOutput
	case mDetail:
		f.flags |= sawDetail
	case mError:
		f.flags |= sawError
	}
	if c == '[' {
		if m == mChoices {
			return objChoices
		}
		return objUnknown
	}
	switch m {
	case mRoot:
		return o
	case mChoice:
		f.flags |= sawChoice
		return objChoice
	case mError:
		return objError
	case mUsage:
		return objUsage
	case mUsageDetails:
		return objCached
	case mResponse:
		return objResponse
	case mMessage:
		if o == objRoot {
			return objMessage
		}
	case mDelta:
		return objDelta
	case mFinish:
		if o != objFinish {
			return objFinish
		}
	case mMeta:
		f.flags |= sawOutput
		return objMeta
	case mDetails:
		f.flags |= sawEnd
		return objDetails
	case mTimings:
		return objTimings
	}
	return objUnknown
}

// isCutOff reports whether a finish reason (or status of a response) says that
// the server gave up on the answer.
func isCutOff(reason []byte) bool {
	switch string(reason) {
	case "abort", "error", "failed", "cancelled":
		return true
	}
	return false
}
