package openai

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"mime"
	"mime/multipart"
	"strings"
	"testing"
)

// form makes a body as multipart.Writer and so most clients do. A field whose
// name ends in "@" is a file.
func form(t testing.TB, fields ...string) (contentType string, body []byte) {
	t.Helper()
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	for i := 0; i < len(fields); i += 2 {
		var p io.Writer
		var err error
		if name, ok := strings.CutSuffix(fields[i], "@"); ok {
			p, err = w.CreateFormFile(name, "a.wav")
		} else {
			p, err = w.CreateFormField(name)
		}
		if err == nil {
			_, err = io.WriteString(p, fields[i+1])
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return w.FormDataContentType(), b.Bytes()
}

func TestPeekMultipart(t *testing.T) {
	audio := make([]byte, 25<<20)
	rnd := rand.New(rand.NewPCG(1, 1))
	for i := 0; i < len(audio); i += 8 {
		x := rnd.Uint64()
		for k := range 8 {
			audio[i+k] = byte(x >> (8 * k))
		}
	}
	ct, body := form(t, "file@", string(audio), "language", "de", "timestamp_granularities[]", "word", "timestamp_granularities[]", "segment",
		"stream", "true", "model", "org/whisper-large:v3@x", "prompt", "model=other\r\n\r\n--x")
	before := bytes.Clone(body)
	var r Request
	if err := PeekMultipart(Transcriptions, ct, body, &r); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(body, before) {
		t.Fatal("the body was changed")
	}
	if string(r.Model) != "org/whisper-large:v3@x" || string(r.ModelRange.Of(body)) != string(r.Model) || !r.Stream || r.API != Transcriptions {
		t.Errorf("%+v", r.Facts)
	}
	got := SpliceModel(nil, body, &r.Facts, "other")
	if want := bytes.Replace(body, []byte("org/whisper-large:v3@x"), []byte("other"), 1); !bytes.Equal(got, want) {
		t.Error("SpliceModel changes more than the model")
	}

	refused := func(message string, fields ...string) {
		t.Helper()
		ct, body := form(t, fields...)
		err := PeekMultipart(Transcriptions, ct, body, &r)
		if err == nil || !strings.Contains(err.Error(), message) {
			t.Errorf("%q: %v; want %s", fields, err, message)
		}
	}
	refused("model is missing", "file@", "x")
	refused("is there twice", "model", "a", "file@", "x", "model", "a")
	refused("is there twice", "model", "a", "stream", "true", "stream", "false")
	refused("is empty", "model", "")
	refused("is a file", "model@", "a")
	refused("one line of UTF-8", "model", "a\xff")
	refused("one line of UTF-8", "model", "a\r\nb")
	refused("neither true nor false", "model", "a", "stream", "maybe")
	if err := PeekMultipart(Transcriptions, ct, body[:len(body)-10], &r); err == nil {
		t.Error("a cut-off form passes")
	}

	raw := func(body, message string) {
		t.Helper()
		err := PeekMultipart(Translations, "multipart/form-data; boundary=B", []byte(body), &r)
		if message == "" {
			if err != nil || string(r.Model) != "m" {
				t.Errorf("%q: %v, model %q", body, err, r.Model)
			}
			return
		}
		var be *BodyError
		if !errors.As(err, &be) || !strings.Contains(be.Message, message) {
			t.Errorf("%q: %v; want %s", body, err, message)
		}
	}
	part := "Content-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n"
	raw("--B\r\n"+part+"--B--", "")
	raw("--B \t\r\n"+part+"--B--\r\n", "")
	raw("--B\r\ncontent-disposition:form-data;name=model\r\nContent-Type: text/plain\r\n\r\nm\r\n--B--\r\n", "")
	raw("", "doesn't begin with the boundary")
	raw("preamble\r\n--B\r\n"+part+"--B--", "doesn't begin with the boundary")
	raw("--B\r\n"+part+"--B-- \r\n\r\n", "")
	raw("--B\r\n"+part+"--B--\r\nmore", "something follows")
	raw("--B\r\n"+part+"--B--\n", "something follows")
	raw("--B\r\n"+part+"--B", "is cut off")
	raw("--B\r\n"+part, "is cut off")
	raw("--B\n"+strings.ReplaceAll(part, "\r", "")+"--B--", "something else after a boundary")
	raw("--B\r\n"+part+"--BB\r\n"+part+"--B--", "something else after a boundary")
	raw("--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n--B--", "is cut off")
	raw("--B\r\n\r\nm\r\n--B--", "can't be read")
	raw("--B\r\nContent-Disposition: form-data\r\n\r\nm\r\n--B--", "can't be read")
	raw("--B\r\nContent-Disposition: form-data; name*=UTF-8''model\r\n\r\nm\r\n--B--", "can't be read")
	raw("--B\r\nContent-Disposition: form-data; name=x\r\nContent-Disposition: form-data; name=model\r\n\r\nm\r\n--B--", "can't be read")
	raw("--B\r\nContent-Disposition: form-data;\r\n name=model\r\n\r\nm\r\n--B--", "can't be read")
	raw("--B\r\nContent-Disposition: form-data; name=model\r\nContent-Transfer-Encoding: base64\r\n\r\nbQ==\r\n--B--", "encoded")
	raw("--B\r\nX: \x10\r\n"+part+"--B--", "can't be read")
	raw("--B\r\nX Y: z\r\n"+part+"--B--", "can't be read")
	raw("--B\r\nX\xff: z\r\n"+part+"--B--", "can't be read")
	raw("--B\r\nX: "+strings.Repeat("x", 9000)+"\r\n\r\nm\r\n--B--", "within 8 KiB")
	raw(strings.Repeat("--B\r\nContent-Disposition: form-data; name=x\r\n\r\n\r\n", 257)+"--B--", "more than 256 parts")

	for _, ct := range []string{
		"", "application/json", "multipart/form-data", "multipart/mixed; boundary=B", "multipart/form-data; boundary=",
		"multipart/form-data; boundary=B; boundary=C", "multipart/form-data; boundary=" + strings.Repeat("b", 71),
	} {
		if err := PeekMultipart(Transcriptions, ct, []byte("--B\r\n"+part+"--B--"), &r); !errors.Is(err, ErrContentType) {
			t.Errorf("%q: %v", ct, err)
		}
	}
	if err := PeekMultipart(Transcriptions, "multipart/form-data; boundary=B", []byte("--B--"), &r); !errors.Is(err, ErrModelMissing) {
		t.Errorf("empty form: %v", err)
	}
}

// FuzzPeekMultipart checks that what passes is read the same by mime/multipart.
func FuzzPeekMultipart(f *testing.F) {
	ct, body := form(f, "file@", "RIFF\r\n--\x00", "stream", "true", "model", "m")
	f.Add(ct, body)
	ct, body = form(f, "model", "a", "model", "b")
	f.Add(ct, body)
	f.Add("multipart/form-data; boundary=B", []byte("--B\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--B--"))
	f.Add("multipart/form-data; boundary=\"B C\"", []byte("--B C \r\nContent-Disposition: form-data; name=\"mo\\\"del\"\r\n\r\n\r\n--B C--\r\n"))
	f.Fuzz(func(t *testing.T, contentType string, body []byte) {
		var r Request
		before := bytes.Clone(body)
		err := PeekMultipart(Transcriptions, contentType, body, &r)
		if !bytes.Equal(before, body) {
			t.Fatal("the body was changed")
		}
		if err != nil {
			var be *BodyError
			if !errors.As(err, &be) || be.Offset < 0 || be.Offset > len(body) {
				t.Fatalf("%#v", err)
			}
			return
		}
		_, params, err := mime.ParseMediaType(contentType)
		if err != nil {
			t.Fatal(err)
		}
		var models, streams []string
		for mr := multipart.NewReader(bytes.NewReader(body), params["boundary"]); ; {
			p, err := mr.NextRawPart()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatalf("mime/multipart refuses what we accept: %v\n%q", err, body)
			}
			text, err := io.ReadAll(p)
			if err != nil {
				t.Fatal(err)
			}
			switch p.FormName() {
			case "model":
				models = append(models, string(text))
			case "stream":
				streams = append(streams, string(text))
			}
		}
		if len(models) != 1 || models[0] != string(r.Model) || len(streams) > 1 {
			t.Fatalf("mime/multipart finds models %q, streams %q; we %q\n%q", models, streams, r.Model, body)
		}
	})
}
