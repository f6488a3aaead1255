package admin

import (
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"strings"

	"go.uber.org/zap"
)

// token is what actions ask for; "": there are none.
func (s *Server) token() string {
	if s.o.Token == nil {
		return ""
	}
	return s.o.Token()
}

// action guards h by the token. Without one configured there is no such page, unless the action is open: then it needs the
// token only where there is one.
func (s *Server) action(open bool, h http.HandlerFunc) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		want := s.token()
		switch {
		case want == "" && open:
		case want == "":
			writeJSON(w, http.StatusNotFound, errorBody{"actions are off; set admin.token or admin.token_file to have them"})
			return
		case !sameSecret(bearer(r), want):
			s.o.Log.Warn("an action was refused for want of the admin token", zap.String("path", r.URL.Path), zap.String("client_addr", r.RemoteAddr))
			w.Header().Set("WWW-Authenticate", "Bearer")
			what := "this needs the admin token, Authorization: Bearer …, and none was sent"
			if bearer(r) != "" {
				what = "the admin token that was sent is not the one in admin.token"
			}
			writeJSON(w, http.StatusUnauthorized, errorBody{what})
			return
		}
		h(w, r)
	}
}

func bearer(r *http.Request) string {
	const scheme = "Bearer "
	a := r.Header.Get("Authorization")
	if len(a) < len(scheme) || !strings.EqualFold(a[:len(scheme)], scheme) {
		return ""
	}
	return strings.TrimSpace(a[len(scheme):])
}

// sameSecret compares in a time that tells nothing of want, its length included.
func sameSecret(got, want string) bool {
	a, b := sha256.Sum256([]byte(got)), sha256.Sum256([]byte(want))
	return subtle.ConstantTimeCompare(a[:], b[:]) == 1
}

// drain is POST /-/drain and /-/readmit ?endpoint=ID.
func (s *Server) drain(on bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		id := r.URL.Query().Get("endpoint")
		found, changed := s.o.Drain(id, on)
		if !found {
			writeJSON(w, http.StatusNotFound, errorBody{"there is no endpoint " + clip(id) + "; kvgate endpoints lists them"})
			return
		}
		writeJSON(w, 200, map[string]any{"endpoint": id, "draining": on, "changed": changed})
	}
}

// setLogLevel is POST /-/log-level?level=LEVEL.
func (s *Server) setLogLevel(w http.ResponseWriter, r *http.Request) {
	if err := s.o.SetLogLevel(r.URL.Query().Get("level")); err != nil {
		writeJSON(w, http.StatusBadRequest, errorBody{err.Error()})
		return
	}
	writeJSON(w, 200, map[string]string{"level": s.o.LogLevel()})
}

// authorized is GET /-/authorized: whether the token is right, for the dashboard to find out before an action.
func (s *Server) authorized(w http.ResponseWriter, _ *http.Request) {
	writeJSON(w, 200, map[string]bool{"authorized": true})
}
