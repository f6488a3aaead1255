package capture

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
)

// Redacted stands for what is not shown.
const Redacted = "[redacted]"

// shown are the header fields whose values are shown: of all others, names alone. Any header may carry a credential, so it
// can't be a list of those that do.
var shown = []string{
	"accept", "accept-encoding", "accept-language", "connection", "content-length", "content-type", "expect", "host",
	"transfer-encoding", "traceparent", "user-agent", "x-request-id",
}

// shownPrefix begins the fields with which OpenAI's SDKs say what they are.
const shownPrefix = "x-stainless-"

// shortest is the length below which a value is no credential, but a word that bodies may well hold by themselves.
const shortest = 8

// In fields called like a credential everything is one; in others not what is a word: bodies would be full of holes.
var (
	credential = regexp.MustCompile(`(?i)auth|key|token|secret|cookie|pass|session|credential`)
	word       = regexp.MustCompile(`^[A-Za-z]?[a-z]{1,19}$`)
)

// redactHead returns the fields of a header, and the values that were left out.
func redactHead(head []byte) (fields []string, secrets [][]byte) {
	last := "" // for continued lines, which are refused elsewhere
	for line := range bytes.Lines(head) {
		text := strings.TrimRight(string(line), "\r\n")
		name, value, ok := strings.Cut(text, ":")
		if !ok || strings.HasPrefix(text, " ") || strings.HasPrefix(text, "\t") {
			if text != "" && last != "" {
				fields = append(fields, last+": "+Redacted)
			}
			continue
		}
		last = name
		value = strings.TrimSpace(value)
		if n := strings.ToLower(name); slices.Contains(shown, n) || strings.HasPrefix(n, shownPrefix) {
			fields = append(fields, name+": "+value)
			continue
		}
		fields = append(fields, name+": "+Redacted)
		// The value, and what stands behind the scheme of Authorization or the name of a cookie.
		sure := credential.MatchString(name)
		for _, v := range append(strings.FieldsFunc(value, func(c rune) bool { return c == ' ' || c == ';' || c == '=' }), value) {
			if len(v) >= shortest && (sure || !word.MatchString(v)) {
				secrets = append(secrets, []byte(v))
			}
		}
	}
	// The longest first: one may be a part of another.
	slices.SortFunc(secrets, func(a, b []byte) int { return len(b) - len(a) })
	return fields, secrets
}

// fieldPattern finds members of JSON objects that are called like a credential, whose strings are left out; also one that
// a cut has left without its end. What looks like a key of a well-known form goes wherever it is.
var (
	fieldPattern = regexp.MustCompile(`(?i)("(?:[a-z0-9_-]*(?:api[_-]?key|secret|password|passwd|authorization|credential|private[_-]?key)[a-z0-9_-]*|token|[a-z]+[_-]token)"\s*:\s*")(?:[^"\\]|\\.)*`)
	keyPattern   = regexp.MustCompile(`(?i)\bbearer\s+[a-z0-9._~+/=-]{8,}|\bsk-[a-z0-9_-]{16,}|\bhf_[a-z0-9]{16,}|\beyJ[a-z0-9_-]{8,}\.[a-z0-9_-]{8,}\.[a-z0-9_-]*`)
)

// redactBody leaves credentials out of a body: the values of header fields that are not shown, wherever they are, members
// called like one, and what has the form of one. Of a body that was cut, a credential's beginning at the end goes too.
func redactBody(body []byte, secrets [][]byte, cut bool) []byte {
	for _, s := range secrets {
		body = bytes.ReplaceAll(body, s, []byte(Redacted))
	}
	if cut {
		for _, s := range secrets {
			for n := min(len(s)-1, len(body)); n >= 4; n-- {
				if bytes.HasSuffix(body, s[:n]) {
					body = append(slices.Clone(body[:len(body)-n]), Redacted...)
					break
				}
			}
		}
	}
	body = fieldPattern.ReplaceAll(body, []byte("${1}"+Redacted))
	return keyPattern.ReplaceAll(body, []byte(Redacted))
}
