// Package dashboard is the page of the admin listener that people look at. It is plain HTML, CSS and JavaScript, embedded
// as it is written: no build step, and nothing is loaded from anywhere else. All it shows comes from /debug/live and
// /debug/decisions. It must import nothing of ours.
package dashboard

import (
	"embed"
	"net/http"
)

//go:embed index.html app.js style.css
var files embed.FS

// Handler serves the page at / and its files beside it.
func Handler() http.Handler {
	next := http.FileServerFS(files)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		// Names of models, endpoints and errors come from outside; no text may become code.
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		h.Set("Referrer-Policy", "no-referrer")
		next.ServeHTTP(w, r)
	})
}
