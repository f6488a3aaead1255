package openai

import (
	"bytes"
	"errors"
	"mime"
	"strings"
	"unicode/utf8"
)

// ErrContentType is wrapped by the error for a body whose Content-Type is not
// multipart/form-data with a boundary. Its status is 415.
var ErrContentType = errors.New("content type is not multipart/form-data")

// Bounds of a form. Audio requests have some ten fields with a header of 100 bytes.
const (
	maxParts           = 256
	maxPartHeaderBytes = 8 << 10
	maxBoundaryBytes   = 70 // RFC 2046 §5.1.1
)

// PeekMultipart reads what a gateway must know from a multipart/form-data body
// and leaves it in r, which it resets first: the fields model and stream. The
// model is found wherever it stands. body is not changed or kept.
//
// Servers differ in how they read odd forms, so only forms that all read alike
// pass: lines end with CRLF, the first boundary stands at the beginning and
// nothing but white space follows the last one, nothing that begins with the
// boundary stands inside a part, and the fields that are read are there once, are
// no files and aren't encoded.
func PeekMultipart(api API, contentType string, body []byte, r *Request) error {
	r.Reset()
	r.API = api
	if err := r.peekForm(contentType, body); err != nil {
		return err
	}
	return nil
}

func (r *Request) peekForm(contentType string, b []byte) *BodyError {
	kind, params, err := mime.ParseMediaType(contentType)
	boundary := params["boundary"]
	if err != nil || kind != "multipart/form-data" || boundary == "" || len(boundary) > maxBoundaryBytes || strings.ContainsAny(boundary, "\r\n") {
		return &BodyError{Message: `the content type must be multipart/form-data; boundary=…, with a boundary of 1 to 70 characters`, err: ErrContentType}
	}
	delimiter := []byte("\r\n--" + boundary)
	bad := func(at int, what string) *BodyError { return fieldError("form", at, what) }

	// i is always behind a delimiter.
	if !bytes.HasPrefix(b, delimiter[2:]) {
		return bad(0, "doesn't begin with the boundary of its content type")
	}
	i := len(delimiter) - 2
	for range maxParts {
		if bytes.HasPrefix(b[i:], []byte("--")) {
			rest := bytes.TrimLeft(b[i+2:], " \t")
			if len(rest) > 0 && !bytes.HasPrefix(rest, []byte("\r\n")) || len(bytes.TrimLeft(rest, " \t\r\n")) > 0 {
				return bad(len(b)-len(rest), "something follows the last boundary; send nothing after it")
			}
			if r.Model == nil {
				return &BodyError{Offset: i, Field: "model", Message: "model is missing; add a form field called model", err: ErrModelMissing}
			}
			return nil
		}
		// White space after a boundary is padding.
		for i < len(b) && (b[i] == ' ' || b[i] == '\t') {
			i++
		}
		if !bytes.HasPrefix(b[i:], []byte("\r\n")) {
			if i+1 >= len(b) {
				return bad(len(b), "is cut off; send all of it, up to the last boundary")
			}
			return bad(i, "something else after a boundary; want CRLF, or -- after the last one")
		}
		header := i
		length := bytes.Index(b[header:min(len(b), header+maxPartHeaderBytes)], []byte("\r\n\r\n"))
		if length < 0 {
			return bad(header, "a part has no end of its header within 8 KiB; want an empty line")
		}
		content := header + length + 4
		size := bytes.Index(b[content:], delimiter)
		if size < 0 {
			// An empty part's empty line may be the one of the next delimiter.
			return bad(len(b), "is cut off; send all of it, up to the last boundary")
		}
		// A boundary in the header would end the part for some parsers.
		if bytes.Contains(b[header:content], delimiter) {
			return bad(header, "a part has no content; want an empty line after its header")
		}
		v := Range{content, content + size}
		if err := r.part(b, Range{header + 2, header + length + 2}, v); err != nil {
			return err
		}
		i = v.End + len(delimiter)
	}
	return bad(i, "has more than 256 parts; send fewer")
}

// part reads one part of a form; header is a number of lines that end with CRLF.
func (r *Request) part(b []byte, header, v Range) *BodyError {
	name, file, encoded, ok := partName(header.Of(b))
	if !ok {
		return fieldError("form", header.Start, `a part has a header that can't be read; want one line Content-Disposition: form-data; name="…"`)
	}
	if name != "model" && name != "stream" {
		return nil
	}
	if file || encoded {
		return fieldError(name, v.Start, "is a file or encoded; want a plain form field")
	}
	text := v.Of(b)
	if !utf8.Valid(text) || bytes.ContainsAny(text, "\x00\r\n") {
		return fieldError(name, v.Start, "is not plain text; want one line of UTF-8")
	}
	if name == "model" && r.Model != nil || name == "stream" && r.StreamRange != (Range{}) {
		return fieldError(name, v.Start, "is there twice; send it once")
	}
	if name == "model" {
		if len(text) == 0 {
			return fieldError(name, v.Start, "is empty; name a model")
		}
		r.Model, r.ModelRange, r.multipart = text, v, true
		return nil
	}
	r.StreamRange = v
	// The words that pydantic, which most servers read forms with, knows.
	switch strings.ToLower(string(text)) {
	case "true", "1", "on", "yes", "t", "y":
		r.Stream = true
	case "false", "0", "off", "no", "f", "n":
	default:
		return fieldError(name, v.Start, "is neither true nor false")
	}
	return nil
}

// partName reads the header of a part.
func partName(header []byte) (name string, file, encoded, ok bool) {
	for len(header) > 0 {
		var line []byte
		line, header, _ = bytes.Cut(header, []byte("\r\n"))
		key, value, colon := bytes.Cut(line, []byte(":"))
		// No folded lines, no line ends of another kind, no odd names.
		if !colon || !isToken(key) || !utf8.Valid(line) || bytes.ContainsFunc(line, isControl) {
			return "", false, false, false
		}
		switch strings.ToLower(string(key)) {
		case "content-disposition":
			text := strings.ToLower(string(value))
			kind, params, err := mime.ParseMediaType(string(value))
			// name*= is not for forms (RFC 7578 §4.2); some parsers take it, some don't.
			if ok || err != nil || kind != "form-data" || strings.Contains(strings.ReplaceAll(text, "filename*", ""), "name*") {
				return "", false, false, false
			}
			name, ok = params["name"]
			if !ok {
				return "", false, false, false
			}
			_, file = params["filename"]
		case "content-transfer-encoding":
			switch strings.ToLower(strings.TrimSpace(string(value))) {
			case "7bit", "8bit", "binary":
			default:
				encoded = true
			}
		}
	}
	return name, file, encoded, ok
}

// isControl reports whether r may not stand in a header.
func isControl(r rune) bool { return r < 0x20 && r != '\t' || r == 0x7f }

// isToken reports whether s may be the name of a header (RFC 9110 §5.6.2).
func isToken(s []byte) bool {
	for _, c := range s {
		if !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9') && bytes.IndexByte(tokenMarks, c) < 0 {
			return false
		}
	}
	return len(s) > 0
}

var tokenMarks = []byte("!#$%&'*+-.^_`|~")
