package openai

import "strings"

// API names one request format: which fields a body has and what they mean.
type API uint8

// The APIs that are forwarded. The zero API is none of them.
const (
	APINone         API = iota
	ChatCompletions     // /v1/chat/completions
	Completions         // /v1/completions
	Embeddings          // /v1/embeddings
	Responses           // /v1/responses and what hangs below it
	Messages            // /v1/messages (Anthropic)
	CountTokens         // /v1/messages/count_tokens (Anthropic)
	Rerank              // /rerank, /v1/rerank, /v2/rerank
	Score               // /score, /v1/score
	Pooling             // /pooling
	Classify            // /classify, /v1/classify
	Tokenize            // /tokenize, /v1/tokenize
	Detokenize          // /detokenize, /v1/detokenize
	Transcriptions      // /v1/audio/transcriptions (multipart)
	Translations        // /v1/audio/translations (multipart)
	Models              // /v1/models and /v1/models/{id}
	numAPIs
)

var apiNames = [numAPIs]string{
	"none", "chat_completions", "completions", "embeddings", "responses", "messages", "count_tokens", "rerank",
	"score", "pooling", "classify", "tokenize", "detokenize", "transcriptions", "translations", "models",
}

// String returns the API's name as logs and metric labels use it.
func (a API) String() string {
	if a < numAPIs {
		return apiNames[a]
	}
	return "none"
}

// Streams reports whether a request of this API may ask for a stream.
func (a API) Streams() bool {
	switch a {
	case ChatCompletions, Completions, Responses, Messages, Transcriptions, Translations:
		return true
	}
	return false
}

// ModelOptional reports whether servers answer this API without a model name.
func (a API) ModelOptional() bool { return a == Tokenize || a == Detokenize }

// Kind says how a route is served.
type Kind uint8

// The kinds of routes.
const (
	KindNone      Kind = iota
	KindJSON           // a JSON body that names the model: Peek
	KindMultipart      // a multipart form that names the model: PeekMultipart
	KindStored         // no body to read; goes where response Route.ID was made
	KindModelList      // answered by the gateway: all models
	KindModel          // answered by the gateway: the model that Route.ID names
)

// Style is the shape in which an API reports errors.
type Style uint8

// The error styles.
const (
	StyleOpenAI    Style = iota // {"error":{"message","type","param","code"}}
	StyleAnthropic              // {"type":"error","error":{"type","message"}}
)

// Route is what a method and a path ask for.
type Route struct {
	API   API
	Kind  Kind
	Style Style // set for unknown paths and methods too, so that their errors have the right shape
	// ID is the raw path segment of a KindStored route (a response id; letters,
	// digits, '-', '_', '.', '~' only) or of a KindModel route (percent-encoded as
	// it came, see AppendUnescaped; it may contain slashes). It aliases the path.
	ID []byte
	// Allow is the value of the Allow header when the path exists but not with
	// this method; empty otherwise.
	Allow string
}

// FindRoute finds the route of a request. path is the request target as it was
// sent, up to '?': it is compared byte by byte and never normalised or decoded,
// so no spelling of another path reaches a route. It reports false for a path
// that doesn't exist (Allow is empty: 404) and for one that exists with another
// method (Allow is set: 405). Paths that administer model servers
// (/v1/load_lora_adapter, /sleep, /metrics, …) don't exist. It doesn't allocate.
func FindRoute(method, path []byte) (Route, bool) {
	r := lookup(path)
	if r.Kind == KindNone {
		return r, false
	}
	if wholeWord(r.Allow, method) {
		r.Allow = ""
		return r, true
	}
	return Route{Style: r.Style, Allow: r.Allow}, false
}

// wholeWord reports whether m is one of the methods in allow ("GET, DELETE").
func wholeWord(allow string, m []byte) bool {
	for len(allow) > 0 {
		var word string
		word, allow, _ = strings.Cut(allow, ", ")
		if word == string(m) {
			return true
		}
	}
	return false
}

const (
	responsesPrefix = "/v1/responses/"
	modelsPrefix    = "/v1/models/"
	messagesPath    = "/v1/messages"
)

// maxResponseIDBytes bounds the id in a path. Servers make ids of at most 64
// bytes ("resp_" and a UUID, or the client's X-Request-Id).
const maxResponseIDBytes = 256

// Paths are the paths that don't hold an id, for help and hints.
var Paths = []string{
	"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
	"/rerank", "/v1/rerank", "/v2/rerank", "/score", "/v1/score", "/pooling", "/classify", "/v1/classify",
	"/tokenize", "/v1/tokenize", "/detokenize", "/v1/detokenize", "/v1/audio/transcriptions", "/v1/audio/translations", "/v1/models",
}

// lookup finds the route by path alone; Allow holds the methods it has.
func lookup(path []byte) Route {
	post := func(a API) Route { return Route{API: a, Kind: KindJSON, Allow: "POST"} }
	switch string(path) {
	case "/v1/chat/completions":
		return post(ChatCompletions)
	case "/v1/completions":
		return post(Completions)
	case "/v1/embeddings":
		return post(Embeddings)
	case "/v1/responses":
		return post(Responses)
	case messagesPath:
		return Route{API: Messages, Kind: KindJSON, Style: StyleAnthropic, Allow: "POST"}
	case messagesPath + "/count_tokens":
		return Route{API: CountTokens, Kind: KindJSON, Style: StyleAnthropic, Allow: "POST"}
	case "/rerank", "/v1/rerank", "/v2/rerank":
		return post(Rerank)
	case "/score", "/v1/score":
		return post(Score)
	case "/pooling":
		return post(Pooling)
	case "/classify", "/v1/classify":
		return post(Classify)
	case "/tokenize", "/v1/tokenize":
		return post(Tokenize)
	case "/detokenize", "/v1/detokenize":
		return post(Detokenize)
	case "/v1/audio/transcriptions":
		return Route{API: Transcriptions, Kind: KindMultipart, Allow: "POST"}
	case "/v1/audio/translations":
		return Route{API: Translations, Kind: KindMultipart, Allow: "POST"}
	case "/v1/models":
		return Route{API: Models, Kind: KindModelList, Allow: "GET"}
	}
	if len(path) > len(responsesPrefix) && string(path[:len(responsesPrefix)]) == responsesPrefix {
		return lookupResponse(path[len(responsesPrefix):])
	}
	if len(path) > len(modelsPrefix) && string(path[:len(modelsPrefix)]) == modelsPrefix {
		return Route{API: Models, Kind: KindModel, ID: path[len(modelsPrefix):], Allow: "GET"}
	}
	if len(path) > len(messagesPath) && string(path[:len(messagesPath)+1]) == messagesPath+"/" {
		return Route{Style: StyleAnthropic}
	}
	return Route{}
}

// lookupResponse finds the route of /v1/responses/{rest}.
func lookupResponse(rest []byte) Route {
	n := 0
	for n < len(rest) && isUnreserved(rest[n]) {
		n++
	}
	id, tail := rest[:n], rest[n:]
	// "." and ".." are path steps to whoever normalises after us.
	if n == 0 || n > maxResponseIDBytes || string(id) == "." || string(id) == ".." {
		return Route{}
	}
	r := Route{API: Responses, Kind: KindStored, ID: id}
	switch string(tail) {
	case "":
		r.Allow = "GET, DELETE"
	case "/cancel":
		r.Allow = "POST"
	case "/input_items":
		r.Allow = "GET"
	default:
		return Route{}
	}
	return r
}

// isUnreserved reports whether c needs no escape in a URL (RFC 3986 §2.3).
func isUnreserved(c byte) bool {
	return c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_' || c == '.' || c == '~'
}

// AppendUnescaped appends seg with its percent-encoding undone, exactly once, and
// reports whether every '%' was followed by two hexadecimal digits. The result is
// for look-ups only; never use it as a path.
func AppendUnescaped(dst, seg []byte) ([]byte, bool) {
	for i := 0; i < len(seg); i++ {
		c := seg[i]
		if c == '%' {
			if i+2 >= len(seg) {
				return dst, false
			}
			hi, lo := unhex(seg[i+1]), unhex(seg[i+2])
			if hi < 0 || lo < 0 {
				return dst, false
			}
			c = byte(hi<<4 | lo)
			i += 2
		}
		dst = append(dst, c)
	}
	return dst, true
}

// unhex returns the value of a hexadecimal digit, or -1.
func unhex(c byte) int32 {
	switch {
	case c >= '0' && c <= '9':
		return int32(c - '0')
	case c >= 'a' && c <= 'f':
		return int32(c-'a') + 10
	case c >= 'A' && c <= 'F':
		return int32(c-'A') + 10
	}
	return -1
}
