package modelsim

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// api is one generation API: how it names its prompt and how it writes answers.
type api struct {
	prompts func(x *exchange, j *job) ([]prompt, error)
	whole   func(x *exchange, j *job) string
	wire    func(x *exchange, j *job) wire
}

// wire writes a stream in one API's events.
type wire interface {
	begin() error // when the headers are out, before the first token
	token(choice int, word string) error
	finish(choice int, reason string) error
	end() error // after all choices
}

var (
	chatAPI        = &api{chatPrompts, chatWhole, func(x *exchange, j *job) wire { return newChunkWire(x, j, true) }}
	completionsAPI = &api{completionPrompts, completionWhole, func(x *exchange, j *job) wire { return newChunkWire(x, j, false) }}
	messagesAPI    = &api{messagesPrompts, messagesWhole, func(x *exchange, j *job) wire { return &messagesWire{x: x, j: j} }}
	responsesAPI   = &api{responsesPrompts, responsesWhole, func(x *exchange, j *job) wire { return &responsesWire{x: x, j: j} }}
)

func missing(field string) *apiError {
	return &apiError{
		http.StatusBadRequest, "BadRequestError",
		fmt.Sprintf("1 validation error: {'type': 'missing', 'loc': ('body', '%s'), 'msg': 'Field required'}", field), field,
	}
}

// Chat and completions.

func chatPrompts(x *exchange, _ *job) ([]prompt, error) {
	var messages []chatMessage
	if err := x.field("messages", &messages); err != nil {
		return nil, err
	}
	if len(messages) == 0 {
		return nil, missing("messages")
	}
	return []prompt{renderChat(messages, x.fields["tools"])}, nil
}

func completionPrompts(x *exchange, _ *job) ([]prompt, error) {
	prompts, ok := rawPrompts(x.fields["prompt"])
	if !ok {
		return nil, missing("prompt")
	}
	return prompts, nil
}

func (j *job) usageJSON(details bool) string {
	in, out, cached := j.usageTokens()
	d := ""
	if details {
		d = fmt.Sprintf(`,"prompt_tokens_details":{"cached_tokens":%d}`, cached)
	}
	return fmt.Sprintf(`{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d%s}`, in, in+out, out, d)
}

func chatWhole(x *exchange, j *job) string {
	var choices []string
	for i := range j.call.seqs {
		q := &j.call.seqs[i]
		choices = append(choices, fmt.Sprintf(`{"index":%d,"message":{"role":"assistant","content":%s,"refusal":null,"annotations":null,"audio":null,"function_call":null,"tool_calls":[],"reasoning":null},"logprobs":null,"finish_reason":"%s","stop_reason":null,"token_ids":null}`,
			i, quote(q.answer.text(int(q.produced.Load()))), x.reason(q)))
	}
	return fmt.Sprintf(`{"id":%s,"object":"chat.completion","created":%d,"model":%s,"choices":[%s],"service_tier":null,"system_fingerprint":null,"usage":%s,"prompt_logprobs":null,"prompt_token_ids":null,"kv_transfer_params":null}`,
		quote("chatcmpl-"+x.id), x.arrived.Unix(), quote(j.model), strings.Join(choices, ","), j.usageJSON(true))
}

func completionWhole(x *exchange, j *job) string {
	var choices []string
	for i := range j.call.seqs {
		q := &j.call.seqs[i]
		choices = append(choices, fmt.Sprintf(`{"index":%d,"text":%s,"logprobs":null,"finish_reason":"%s","stop_reason":null,"token_ids":null,"prompt_logprobs":null,"prompt_token_ids":null}`,
			i, quote(q.answer.text(int(q.produced.Load()))), x.reason(q)))
	}
	return fmt.Sprintf(`{"id":%s,"object":"text_completion","created":%d,"model":%s,"choices":[%s],"service_tier":null,"system_fingerprint":null,"usage":%s,"kv_transfer_params":null}`,
		quote("cmpl-"+x.id), x.arrived.Unix(), quote(j.model), strings.Join(choices, ","), j.usageJSON(true))
}

// chunkWire streams chat or completion chunks.
type chunkWire struct {
	x    *exchange
	j    *job
	chat bool
	head string // of every chunk, up to the choices
	role []bool // choices whose role chunk is out
	b    []byte
}

func newChunkWire(x *exchange, j *job, chat bool) *chunkWire {
	w := &chunkWire{x: x, j: j, chat: chat}
	id, object := "cmpl-", "text_completion"
	if chat {
		id, object = "chatcmpl-", "chat.completion.chunk"
		w.role = make([]bool, len(j.call.seqs))
	}
	w.head = fmt.Sprintf(`data: {"id":%s,"object":"%s","created":%d,"model":%s,"choices":[`, quote(id+x.id), object, x.arrived.Unix(), quote(j.model))
	return w
}

func (w *chunkWire) begin() error { return nil }

func (w *chunkWire) token(choice int, word string) error {
	if !w.chat {
		return w.chunk(choice, `"text":`+quote(word)+`,"logprobs":null,"finish_reason":null,"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]`, "")
	}
	if err := w.sayRole(choice); err != nil {
		return err
	}
	return w.chunk(choice, `"delta":{"content":`+quote(word)+`},"logprobs":null,"finish_reason":null,"token_ids":null}]`, "")
}

// sayRole sends the role chunk, which comes with the first token.
func (w *chunkWire) sayRole(choice int) error {
	if w.role[choice] {
		return nil
	}
	w.role[choice] = true
	// The role counts as no token, though the first one is under way.
	q := &w.j.call.seqs[choice]
	sent := q.sent
	q.sent = 0
	defer func() { q.sent = sent }()
	return w.chunk(choice, `"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]`, `,"prompt_token_ids":null`)
}

func (w *chunkWire) finish(choice int, reason string) error {
	if !w.chat {
		return w.chunk(choice, `"text":"","logprobs":null,"finish_reason":"`+reason+`","stop_reason":null,"prompt_token_ids":null,"token_ids":null}]`, "")
	}
	if err := w.sayRole(choice); err != nil {
		return err
	}
	return w.chunk(choice, `"delta":{"content":""},"logprobs":null,"finish_reason":"`+reason+`","stop_reason":null,"token_ids":null}]`, "")
}

func (w *chunkWire) chunk(choice int, rest, tail string) error {
	w.b = append(w.b[:0], w.head...)
	w.b = fmt.Appendf(w.b, `{"index":%d,`, choice)
	w.b = append(w.b, rest...)
	if w.j.continua {
		w.b = append(append(w.b, `,"usage":`...), w.j.usageSoFar()...)
	}
	w.b = append(append(w.b, tail...), "}\n\n"...)
	return w.x.event(w.b)
}

// usageSoFar counts what has been written, as continuous_usage_stats does.
func (j *job) usageSoFar() string {
	in, out := j.promptTokens(), 0
	for i := range j.call.seqs {
		out += j.call.seqs[i].sent
	}
	return fmt.Sprintf(`{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d}`, in, in+out, out)
}

func (w *chunkWire) end() error {
	if w.j.usage {
		w.b = append(w.b[:0], w.head...)
		w.b = append(append(append(w.b, `],"usage":`...), w.j.usageJSON(w.chat)...), "}\n\n"...)
		if err := w.x.event(w.b); err != nil {
			return err
		}
	}
	return w.x.event([]byte("data: [DONE]\n\n"))
}

// Anthropic's Messages.

func messagesPrompts(x *exchange, j *job) ([]prompt, error) {
	var messages []chatMessage
	if err := x.field("messages", &messages); err != nil {
		return nil, err
	}
	if len(messages) == 0 {
		return nil, missing("messages")
	}
	if system := x.fields["system"]; len(system) > 0 {
		messages = append([]chatMessage{{Role: "system", Content: system}}, messages...)
	}
	return []prompt{renderChat(messages, x.fields["tools"])}, nil
}

func stopReason(reason string) string {
	if reason == "length" {
		return "max_tokens"
	}
	return "end_turn"
}

// messagesUsage is Anthropic's count: cached tokens are not input tokens.
func messagesUsage(j *job) string {
	in, out, cached := j.usageTokens()
	return fmt.Sprintf(`{"input_tokens":%d,"output_tokens":%d,"cache_read_input_tokens":%d}`, in-cached, out, cached)
}

func messagesWhole(x *exchange, j *job) string {
	q := &j.call.seqs[0]
	return fmt.Sprintf(`{"id":%s,"type":"message","role":"assistant","content":[{"type":"text","text":%s}],"model":%s,"stop_reason":"%s","stop_sequence":null,"usage":%s}`,
		quote("chatcmpl-"+x.id), quote(q.answer.text(int(q.produced.Load()))), quote(j.model), stopReason(x.reason(q)), messagesUsage(j))
}

type messagesWire struct {
	x     *exchange
	j     *job
	begun bool
}

func (w *messagesWire) event(name, data string) error {
	return w.x.event([]byte("event: " + name + "\ndata: " + data + "\n\n"))
}

func (w *messagesWire) begin() error { return nil }

// first sends what vLLM sends once the first token is there.
func (w *messagesWire) first() error {
	if w.begun {
		return nil
	}
	w.begun = true
	if err := w.event("message_start", fmt.Sprintf(`{"type":"message_start","message":{"id":%s,"type":"message","role":"assistant","content":[],"model":%s,"stop_reason":null,"stop_sequence":null,"usage":{"input_tokens":%d,"output_tokens":0}}}`,
		quote("chatcmpl-"+w.x.id), quote(w.j.model), w.j.call.seqs[0].req.PromptTokens)); err != nil {
		return err
	}
	return w.event("content_block_start", `{"type":"content_block_start","content_block":{"type":"text","text":""},"index":0}`)
}

func (w *messagesWire) token(_ int, word string) error {
	if err := w.first(); err != nil {
		return err
	}
	return w.event("content_block_delta", `{"type":"content_block_delta","delta":{"type":"text_delta","text":`+quote(word)+`},"index":0}`)
}

func (w *messagesWire) finish(_ int, reason string) error {
	if err := w.first(); err != nil {
		return err
	}
	if err := w.event("content_block_stop", `{"type":"content_block_stop","index":0}`); err != nil {
		return err
	}
	return w.event("message_delta", `{"type":"message_delta","delta":{"stop_reason":"`+stopReason(reason)+`"},"usage":`+messagesUsage(w.j)+`}`)
}

func (w *messagesWire) end() error { return w.event("message_stop", `{"type":"message_stop"}`) }

// OpenAI's Responses.

func responsesPrompts(x *exchange, j *job) ([]prompt, error) {
	var messages []chatMessage
	var input string
	raw, ok := x.fields["input"]
	if !ok {
		return nil, missing("input")
	}
	if json.Unmarshal(raw, &input) == nil {
		messages = append(messages, chatMessage{Role: "user", Content: raw})
	} else {
		var items []json.RawMessage
		if err := x.field("input", &items); err != nil {
			return nil, err
		}
		for _, item := range items {
			var m chatMessage
			if json.Unmarshal(item, &m) != nil || m.Content == nil {
				m = chatMessage{Role: "tool", Content: item}
			}
			messages = append(messages, m)
		}
	}
	if in := x.fields["instructions"]; len(in) > 0 && string(in) != "null" {
		messages = append([]chatMessage{{Role: "system", Content: in}}, messages...)
	}
	p := renderChat(messages, x.fields["tools"])
	if j.previous != "" {
		old, ok := x.p.response(j.previous)
		if !ok {
			return nil, responseNotFound(j.previous)
		}
		p.text = append([]byte(old.conversation), p.text...)
	}
	return []prompt{p}, nil
}

func responseNotFound(id string) *apiError {
	return &apiError{http.StatusNotFound, "invalid_request_error", fmt.Sprintf("Response with id '%s' not found.", id), "response_id"}
}

func responseID(x *exchange) string { return "resp_" + strings.ReplaceAll(x.id, "-", "") }

// responseObject is the response object in a given status.
func responseObject(x *exchange, j *job, status, output, usage string) string {
	previous, limit, incomplete := "null", fmt.Sprint(x.s.maxModelTokens-j.call.seqs[0].req.PromptTokens), "null"
	if j.previous != "" {
		previous = quote(j.previous)
	}
	if j.limit > 0 {
		limit = fmt.Sprint(j.limit)
	}
	if status == "incomplete" {
		incomplete = `{"reason":"max_output_tokens"}`
	}
	return fmt.Sprintf(`{"id":%s,"created_at":%d,"incomplete_details":%s,"instructions":null,"metadata":null,"model":%s,"object":"response","output":[%s],"parallel_tool_calls":true,"temperature":0.7,"tool_choice":"auto","tools":[],"top_p":0.8,"background":false,"max_output_tokens":%s,"max_tool_calls":null,"previous_response_id":%s,"prompt":null,"reasoning":null,"service_tier":"auto","status":"%s","text":null,"top_logprobs":null,"truncation":"disabled","usage":%s,"user":null}`,
		quote(responseID(x)), x.arrived.Unix(), incomplete, quote(j.model), output, limit, previous, status, usage)
}

// finishedResponse renders the completed object and stores it.
func finishedResponse(x *exchange, j *job) (object, text string) {
	q := &j.call.seqs[0]
	text = q.answer.text(int(q.produced.Load()))
	in, out, cached := j.usageTokens()
	usage := fmt.Sprintf(`{"input_tokens":%d,"input_tokens_details":{"cached_tokens":%d,"input_tokens_per_turn":[],"cached_tokens_per_turn":[]},"output_tokens":%d,"output_tokens_details":{"reasoning_tokens":0,"tool_output_tokens":0,"output_tokens_per_turn":[],"tool_output_tokens_per_turn":[]},"total_tokens":%d}`,
		in, cached, out, in+out)
	status := "completed"
	if x.reason(q) == "length" {
		status = "incomplete"
	}
	object = responseObject(x, j, status, messageItem(x, text, "completed"), usage)
	if j.store {
		x.p.storeResponse(responseID(x), storedResponse{object, string(j.prompts[0].text) + text + "\n"})
	}
	return object, text
}

func messageItem(x *exchange, text, status string) string {
	content := `{"annotations":[],"text":` + quote(text) + `,"type":"output_text","logprobs":null}`
	if status != "completed" {
		content = ""
	}
	return `{"id":` + quote("msg_"+x.id) + `,"content":[` + content + `],"role":"assistant","status":"` + status + `","type":"message"}`
}

func responsesWhole(x *exchange, j *job) string {
	object, _ := finishedResponse(x, j)
	return object
}

type responsesWire struct {
	x        *exchange
	j        *job
	sequence int
	begun    bool
}

// event writes an event; rest are the fields of data but the last two.
func (w *responsesWire) event(name, rest string) error {
	b := fmt.Appendf(nil, "event: %s\ndata: {%s,\"sequence_number\":%d,\"type\":\"%s\"}\n\n", name, rest, w.sequence, name)
	w.sequence++
	return w.x.event(b)
}

// begin: created and in_progress come before the first token.
func (w *responsesWire) begin() error {
	object := `"response":` + responseObject(w.x, w.j, "in_progress", "", "null")
	if err := w.event("response.created", object); err != nil {
		return err
	}
	if err := w.event("response.in_progress", object); err != nil {
		return err
	}
	return w.x.flush()
}

func (w *responsesWire) item() string { return quote("msg_" + w.x.id) }

func (w *responsesWire) first() error {
	if w.begun {
		return nil
	}
	w.begun = true
	if err := w.event("response.output_item.added", `"item":`+messageItem(w.x, "", "in_progress")+`,"output_index":0`); err != nil {
		return err
	}
	return w.event("response.content_part.added", `"content_index":0,"item_id":`+w.item()+`,"output_index":0,"part":{"annotations":[],"text":"","type":"output_text","logprobs":[]}`)
}

func (w *responsesWire) token(_ int, word string) error {
	if err := w.first(); err != nil {
		return err
	}
	return w.event("response.output_text.delta", `"content_index":0,"delta":`+quote(word)+`,"item_id":`+w.item()+`,"logprobs":[],"output_index":0`)
}

func (w *responsesWire) finish(int, string) error { return w.first() }

func (w *responsesWire) end() error {
	object, text := finishedResponse(w.x, w.j)
	if err := w.event("response.output_text.done", `"content_index":0,"item_id":`+w.item()+`,"logprobs":[],"output_index":0,"text":`+quote(text)); err != nil {
		return err
	}
	if err := w.event("response.content_part.done", `"content_index":0,"item_id":`+w.item()+`,"output_index":0,"part":{"annotations":[],"text":`+quote(text)+`,"type":"output_text","logprobs":null}`); err != nil {
		return err
	}
	if err := w.event("response.output_item.done", `"item":`+messageItem(w.x, text, "completed")+`,"output_index":0`); err != nil {
		return err
	}
	name := "response.completed"
	if w.x.reason(&w.j.call.seqs[0]) == "length" {
		name = "response.incomplete"
	}
	return w.event(name, `"response":`+object)
}

// responseStore keeps the latest responses, bounded.
type responseStore struct {
	byID  map[string]storedResponse
	order []string
}

type storedResponse struct {
	object       string // JSON
	conversation string // rendered, for the next turn
}

const maxResponses = 10_000

func (p *process) storeResponse(id string, r storedResponse) {
	p.mu.Lock()
	defer p.mu.Unlock()
	st := &p.responses
	if st.byID == nil {
		st.byID = make(map[string]storedResponse)
	}
	if len(st.order) >= maxResponses {
		delete(st.byID, st.order[0])
		st.order = st.order[1:]
	}
	st.byID[id] = r
	st.order = append(st.order, id)
}

func (p *process) response(id string) (storedResponse, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	r, ok := p.responses.byID[id]
	return r, ok
}

// storedResponse answers GET, DELETE and cancel of a stored response.
func (x *exchange) storedResponse(rest string) error {
	id, cancel := strings.CutSuffix(rest, "/cancel")
	r, ok := x.p.response(id)
	if !ok {
		return responseNotFound(id)
	}
	switch {
	case x.r.Method == http.MethodGet && !cancel:
		return x.json(http.StatusOK, r.object)
	case x.r.Method == http.MethodDelete && !cancel:
		x.p.mu.Lock()
		delete(x.p.responses.byID, id)
		x.p.mu.Unlock()
		return x.json(http.StatusOK, `{"id":`+quote(id)+`,"object":"response","deleted":true}`)
	case x.r.Method == http.MethodPost && cancel:
		return &apiError{http.StatusBadRequest, "invalid_request_error", "Cannot cancel a synchronous response.", "response_id"}
	}
	return x.json(http.StatusMethodNotAllowed, `{"detail":"Method Not Allowed"}`)
}
