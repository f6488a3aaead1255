package admin

import (
	"errors"
	"net/http"
	"time"

	"kvgate/config"
	"kvgate/internal/capture"
)

// capture is POST /-/capture?for=30s&max_bytes=1MiB[&model=MODEL]: requests as lines of JSON, as they come, and how it ended.
func (s *Server) capture(w http.ResponseWriter, r *http.Request) {
	q := r.URL.Query()
	o := capture.Options{Model: q.Get("model")}
	var err, err2 error
	o.For, err = time.ParseDuration(q.Get("for"))
	size, err2 := config.ParseBytes(q.Get("max_bytes"))
	if err != nil || err2 != nil {
		writeJSON(w, http.StatusBadRequest, errorBody{"want a duration as for and a size as max_bytes, such as ?for=30s&max_bytes=1MiB"})
		return
	}
	o.MaxBytes = int64(size)
	run, err := s.o.Capture(o, r.RemoteAddr)
	switch {
	case errors.Is(err, capture.ErrOff):
		writeJSON(w, http.StatusForbidden, errorBody{err.Error()})
		return
	case errors.Is(err, capture.ErrBusy):
		writeJSON(w, http.StatusConflict, errorBody{err.Error()})
		return
	case err != nil:
		writeJSON(w, http.StatusBadRequest, errorBody{err.Error()})
		return
	}
	rc := http.NewResponseController(w)
	_ = rc.SetReadDeadline(time.Time{}) // it would end the capture as if its reader had gone
	w.Header().Set("Content-Type", "application/jsonl")
	w.Header().Set("Cache-Control", "no-store")
	_ = rc.Flush()
	_ = run(r.Context(), flushed{w, rc}) // a reader that has gone; the end is logged where it began
}

// flushed writes at once, to a reader that takes it.
type flushed struct {
	w  http.ResponseWriter
	rc *http.ResponseController
}

func (f flushed) Write(p []byte) (int, error) {
	_ = f.rc.SetWriteDeadline(time.Now().Add(answerTimeout))
	n, err := f.w.Write(p)
	if err == nil {
		err = f.rc.Flush()
	}
	return n, err
}
