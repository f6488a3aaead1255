package metrics

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"

	"kvgate/pool"
)

// models asks for the list of models at url.
func (c *client) models(ctx context.Context, url string) (models []pool.Model, err error) {
	err = c.get(ctx, url, "application/json", func(_ http.Header, body io.Reader, _ bool) error {
		b, err := io.ReadAll(&limited{body, c.limit})
		if err != nil {
			return err
		}
		if models, err = parseModels(b); err != nil {
			return listError{err}
		}
		return nil
	})
	if e, ok := err.(*Error); ok && e.Fault == FaultUnauthorized {
		e.list = true
	}
	return models, err
}

// A listError is an answer that isn't a list of models.
type listError struct{ error }

// parseModels reads OpenAI's list of models as model servers write it. An adapter is what has a parent.
func parseModels(b []byte) ([]pool.Model, error) {
	var list struct {
		Data *[]json.RawMessage `json:"data"`
	}
	if err := json.Unmarshal(b, &list); err != nil {
		return nil, fmt.Errorf("list of models: %w", err)
	}
	if list.Data == nil {
		return nil, fmt.Errorf(`list of models: no "data"`)
	}
	var models []pool.Model
	seen := make(map[string]bool, len(*list.Data))
	for i, card := range *list.Data {
		var m struct {
			ID          string   `json:"id"`
			Parent      *string  `json:"parent"`
			MaxModelLen *float64 `json:"max_model_len"`
		}
		if err := json.Unmarshal(card, &m); err != nil {
			return nil, fmt.Errorf("list of models: entry %d: %w", i, err)
		}
		if m.ID == "" || seen[m.ID] {
			continue
		}
		seen[m.ID] = true
		out := pool.Model{ID: m.ID, Card: card}
		if m.Parent != nil && *m.Parent != m.ID {
			out.Parent = *m.Parent
		}
		if m.MaxModelLen != nil && *m.MaxModelLen > 0 && *m.MaxModelLen < 1<<53 {
			out.MaxModelLen = int64(*m.MaxModelLen)
		}
		models = append(models, out)
	}
	for i := range models {
		m := &models[i]
		if m.Parent == "" || m.MaxModelLen != 0 {
			continue
		}
		// vLLM tells of none for adapters, and means the base model's.
		if j := slices.IndexFunc(models, func(base pool.Model) bool { return base.ID == m.Parent }); j >= 0 {
			m.MaxModelLen = models[j].MaxModelLen
		}
	}
	return models, nil
}

// sameModels reports whether the gateway would treat a and b alike.
func sameModels(a, b []pool.Model) bool {
	if len(a) != len(b) {
		return false
	}
	for i := range a {
		if a[i].ID != b[i].ID || a[i].Parent != b[i].Parent || a[i].MaxModelLen != b[i].MaxModelLen {
			return false
		}
	}
	return true
}
