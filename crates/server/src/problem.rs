//! Problem: how an error is told, as an RFC 9457 document with a stable code.
//!
//! [`TABLE`] is the one list of codes with what each means to a caller. Details name fields, limits and positions and
//! never hold what was sent.

use std::borrow::Cow;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use steadfast::core::json::JsonError;
use steadfast::{Error, Invalid};

/// What an error says about the request, and so what to do with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Nothing was written, and the same request will be refused again.
    RefusedFinal,
    /// Nothing was written; the same request may be accepted later.
    RefusedRetryable,
    /// Nothing was written: what is there already contradicts the request.
    Conflict,
    /// It may have been written. Repeating the request with the same id tells.
    Unknown,
}

/// What stands behind a code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    /// The stable word.
    pub code: &'static str,
    /// The HTTP status it is sent with.
    pub status: u16,
    /// What it says about the request.
    pub class: Class,
    /// The code in a few words, the same for each occurrence.
    pub title: &'static str,
}

const fn row(code: &'static str, status: u16, class: Class, title: &'static str) -> Row {
    Row { code, status, class, title }
}

/// Every code that this server answers with.
pub const TABLE: &[Row] = &[
    // The form of a request.
    row("invalid_request", 400, Class::RefusedFinal, "A field is missing, unknown or of another type"),
    row("invalid_json", 400, Class::RefusedFinal, "The text is not JSON as it is accepted here"),
    row("json_too_deep", 400, Class::RefusedFinal, "The JSON value is nested too deep"),
    row("invalid_id", 400, Class::RefusedFinal, "The id is empty, too long or not printable"),
    row("invalid_signal", 400, Class::RefusedFinal, "The name of the signal is not one"),
    row("invalid_name", 400, Class::RefusedFinal, "The name is empty, too long or not printable"),
    row("invalid_step", 400, Class::RefusedFinal, "The step is empty, too long or not printable"),
    row("invalid_key", 400, Class::RefusedFinal, "The key is reserved, empty, too long or not printable"),
    row("invalid_code", 400, Class::RefusedFinal, "The failure code is empty, too long or not printable"),
    row("invalid_tag", 400, Class::RefusedFinal, "The tag is empty, too long or not printable"),
    row("invalid_namespace", 400, Class::RefusedFinal, "The namespace is empty, too long or not printable"),
    row("invalid_options", 400, Class::RefusedFinal, "An option is out of range"),
    row("invalid_continuation", 400, Class::RefusedFinal, "The continuation means nothing"),
    row("invalid_store", 400, Class::RefusedFinal, "The store cannot be opened by this release"),
    row("invalid_value", 400, Class::RefusedFinal, "The stored value has another form"),
    row("value_too_large", 413, Class::RefusedFinal, "A value is too large"),
    row("writes_too_large", 413, Class::RefusedFinal, "The variables are too large together"),
    row("bulk_too_large", 413, Class::RefusedFinal, "The bulk has too many lines"),
    row("line_too_large", 413, Class::RefusedFinal, "A line of the bulk is too large"),
    row("body_too_large", 413, Class::RefusedFinal, "The body is too large"),
    row("body_timeout", 408, Class::RefusedRetryable, "The body did not arrive in time"),
    row("unsupported_media_type", 415, Class::RefusedFinal, "The body is of another type than this route takes"),
    // Who asks, and for what.
    row("misdirected_request", 421, Class::RefusedFinal, "The request is addressed to another host"),
    row("origin_refused", 403, Class::RefusedFinal, "The request comes from another web page"),
    row("not_found", 404, Class::RefusedFinal, "There is no such route"),
    row("method_not_allowed", 405, Class::RefusedFinal, "The route has no such method"),
    row("unknown_workflow", 404, Class::RefusedFinal, "There is no such workflow"),
    row("unknown_key", 404, Class::RefusedFinal, "The scratchpad has no such key"),
    row("identity_conflict", 409, Class::Conflict, "The id was used for another request"),
    row("workflow_finished", 409, Class::Conflict, "The workflow has ended"),
    row("workflow_failed", 409, Class::Conflict, "The workflow failed"),
    row("workflow_cancelled", 409, Class::Conflict, "The workflow was cancelled"),
    // Not now.
    row("overloaded", 429, Class::RefusedRetryable, "Too much is waiting"),
    row("too_many_connections", 503, Class::RefusedRetryable, "Too many connections are open"),
    row("request_timeout", 503, Class::RefusedRetryable, "The look took too long"),
    row("shut_down", 503, Class::RefusedRetryable, "The engine is shut down"),
    row("store_unavailable", 503, Class::RefusedRetryable, "The store cannot serve now"),
    row("store_recovering", 503, Class::RefusedRetryable, "The store is recovering"),
    row("store_busy", 503, Class::RefusedRetryable, "Other nodes were faster, again and again"),
    row("store_owned", 503, Class::RefusedRetryable, "Another process owns the store"),
    row("store_in_use", 503, Class::RefusedRetryable, "Nodes have the store open"),
    row("store_foreign", 503, Class::RefusedFinal, "The file or schema is no store of this release"),
    row("store_corrupt", 503, Class::RefusedFinal, "A stored row is corrupt"),
    row("sqlite_too_old", 503, Class::RefusedFinal, "The linked SQLite is too old"),
    row("writer_taken", 503, Class::RefusedFinal, "The store's writer is in use"),
    // Nobody knows.
    row("outcome_unknown", 503, Class::Unknown, "Whether it happened is not known"),
    row("internal", 500, Class::Unknown, "A fault of the server"),
];

/// The row of a code.
pub fn find(code: &str) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.code == code)
}

/// An error on its way to the caller. Boxed because it travels in every `Result` and is rare.
#[derive(Debug)]
pub(crate) struct Problem(Box<Told>);

#[derive(Debug)]
struct Told {
    row: Row,
    detail: Cow<'static, str>,
    field: Option<String>,
    size: Option<u64>,
    limit: Option<u64>,
    retry_after_ms: Option<u64>,
    id: Option<String>,
}

/// The document as it is sent.
#[derive(Serialize)]
pub(crate) struct Document<'a> {
    r#type: String,
    title: &'a str,
    status: u16,
    detail: &'a str,
    code: &'a str,
    class: Class,
    #[serde(skip_serializing_if = "Option::is_none")]
    field: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    size: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    limit: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    retry_after_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
}

impl Problem {
    pub(crate) fn new(code: &'static str, detail: impl Into<Cow<'static, str>>) -> Self {
        // A code without a row is a gap in the table, which its test finds. What the code says still goes out.
        let row = find(code).copied().unwrap_or_else(|| row(code, 500, Class::Unknown, "An error"));
        let detail = detail.into();
        Self(Box::new(Told { row, detail, field: None, size: None, limit: None, retry_after_ms: None, id: None }))
    }

    /// A field that is missing, unknown or of another type.
    pub(crate) fn request(field: impl Into<String>, problem: &str) -> Self {
        Invalid::new("invalid_request", field, problem).into()
    }

    /// A fault of ours. What it was stands in the log only, for it may quote anything.
    pub(crate) fn internal() -> Self {
        Self::new("internal", "a fault of the server; its log tells more")
    }

    pub(crate) fn unknown_outcome(id: impl Into<String>) -> Self {
        let detail = "whether it happened is not known; repeat the request with the same id to learn it";
        Self::new("outcome_unknown", detail).id(id)
    }

    pub(crate) fn limit(mut self, limit: usize) -> Self {
        self.0.limit = Some(limit as u64);
        self
    }

    pub(crate) fn size(mut self, size: u64) -> Self {
        self.0.size = Some(size);
        self
    }

    pub(crate) fn id(mut self, id: impl Into<String>) -> Self {
        self.0.id = Some(id.into());
        self
    }

    pub(crate) fn retry_after_ms(mut self, ms: u64) -> Self {
        self.0.retry_after_ms = Some(ms);
        self
    }

    #[cfg(test)]
    pub(crate) fn document_detail(&self) -> &str {
        &self.0.detail
    }

    pub(crate) fn document(&self) -> Document<'_> {
        Document {
            r#type: format!("urn:steadfast:problem:{}", self.0.row.code),
            title: self.0.row.title,
            status: self.0.row.status,
            detail: &self.0.detail,
            code: self.0.row.code,
            class: self.0.row.class,
            field: self.0.field.as_deref(),
            size: self.0.size,
            limit: self.0.limit,
            retry_after_ms: self.0.retry_after_ms,
            id: self.0.id.as_deref(),
        }
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.0.row.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = serde_json::to_vec(&self.document()).expect("strings and integers serialize");
        let mut response = (status, body).into_response();
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(ms) = self.0.retry_after_ms {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(ms.div_ceil(1_000).max(1)));
        }
        response
    }
}

impl From<Invalid> for Problem {
    fn from(invalid: Invalid) -> Self {
        let Invalid { code, field, size, limit, problem } = invalid;
        // The engine names options as its own API spells them; over HTTP they stand below `options`.
        let below = matches!(code, "invalid_options" | "invalid_tag") && !field.starts_with("options");
        let field = if below { format!("options.{field}") } else { field };
        let mut told = Self::new(code, format!("{field} {problem}"));
        (told.0.field, told.0.size, told.0.limit) = (Some(field), size, limit);
        told
    }
}

impl From<JsonError> for Problem {
    fn from(error: JsonError) -> Self {
        let told = Self::new(error.code(), error.to_string());
        match error {
            JsonError::TooDeep { limit, .. } => told.limit(limit),
            _ => told,
        }
    }
}

impl From<Error> for Problem {
    fn from(error: Error) -> Self {
        let code = error.code();
        match error {
            Error::Invalid(invalid) => invalid.into(),
            Error::IdentityConflict { id, .. } => {
                let detail = "the id was used before for another request; give this one an id of its own";
                Self::new(code, detail).id(id.as_str())
            }
            Error::SignalConflict { signal_id, .. } => {
                let detail =
                    "the id was used before for another signal to this workflow; give this one an id of its own";
                Self::new(code, detail).id(signal_id.as_str())
            }
            Error::SignalUnknown { signal_id, .. } => Self::unknown_outcome(signal_id.as_str()),
            Error::WorkflowFinished { id, status } => {
                let detail = format!("the workflow has ended ({}) and takes no signals", status.label());
                Self::new(code, detail).id(id.as_str())
            }
            Error::UnknownWorkflow { id } => Self::new(code, "there is no workflow of this id").id(id.as_str()),
            Error::Overloaded { retry_after_ms } => {
                let detail = "more requests wait than are taken; nothing was written, try again later";
                Self::new(code, detail).retry_after_ms(retry_after_ms)
            }
            Error::OutcomeUnknown { id: Some(id) } => Self::unknown_outcome(id.as_str()),
            Error::OutcomeUnknown { id: None } => {
                let detail = "whether it happened is not known; repeat the request to learn it";
                Self::new(code, detail)
            }
            Error::Store(source) => {
                tracing::error!(code, error = &*source as &dyn std::error::Error, "the store failed a request");
                Self::new(code, "the store cannot serve this now; nothing was written").retry_after_ms(1_000)
            }
            Error::Closed => Self::new(code, "the engine is shut down; nothing was written").retry_after_ms(1_000),
            // How a workflow ended is an answer here and no error; these are for completeness.
            Error::WorkflowFailed { .. } => Self::new(code, "the workflow failed"),
            Error::WorkflowCancelled { .. } => Self::new(code, "the workflow was cancelled"),
            Error::Value { .. } => Self::new(code, "a stored value does not have the form that was asked for"),
            error @ Error::Internal(_) => {
                tracing::error!(%error, "a request met a fault of ours");
                Self::internal()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;
    use std::sync::Arc;

    use steadfast::core::event::DecodeError;
    use steadfast::core::state::Status;
    use steadfast::core::text::{Namespace, SignalId, WorkflowId, WorkflowKey};
    use steadfast::store::StoreError;

    use super::*;

    fn id() -> WorkflowId {
        WorkflowId::trusted("w")
    }

    /// One of each; a new variant does not compile until it stands here.
    fn errors() -> Vec<Error> {
        let store = || Error::Store(Arc::new(StoreError::WriterTaken));
        let every = vec![
            Error::Invalid(Invalid::new("invalid_id", "id", "is empty")),
            Error::IdentityConflict { id: id(), admitted_at: 0 },
            Error::SignalConflict { id: id(), signal_id: SignalId::trusted("s"), accepted_at: 0 },
            Error::SignalUnknown { id: id(), signal_id: SignalId::trusted("s") },
            Error::WorkflowFinished { id: id(), status: Status::Completed },
            Error::UnknownWorkflow { id: id() },
            Error::Overloaded { retry_after_ms: 1_001 },
            Error::OutcomeUnknown { id: Some(id()) },
            Error::OutcomeUnknown { id: None },
            store(),
            Error::Closed,
            Error::WorkflowFailed { failure: "boom".into(), reason: "it broke".into() },
            Error::WorkflowCancelled { reason: "enough".into() },
            Error::Value { what: "result".into(), problem: "line 1".into() },
            Error::Internal("secret".into()),
        ];
        for error in &every {
            match error {
                Error::Invalid(_)
                | Error::IdentityConflict { .. }
                | Error::SignalConflict { .. }
                | Error::SignalUnknown { .. }
                | Error::WorkflowFinished { .. }
                | Error::UnknownWorkflow { .. }
                | Error::Overloaded { .. }
                | Error::OutcomeUnknown { .. }
                | Error::Store(_)
                | Error::Closed
                | Error::WorkflowFailed { .. }
                | Error::WorkflowCancelled { .. }
                | Error::Value { .. }
                | Error::Internal(_) => {}
            }
        }
        every
    }

    fn store_errors() -> Vec<StoreError> {
        let (path, problem) = (|| "secret".into(), || "secret".to_owned());
        let key = WorkflowKey { namespace: Namespace::default_namespace(), id: id() };
        let source = DecodeError::Unknown { kind: "x".into(), version: 1 };
        vec![
            StoreError::File { doing: "open", path: path(), source: std::io::Error::other("secret") },
            StoreError::Owned { path: path(), owner: problem() },
            StoreError::InUse { place: problem(), nodes: 1 },
            StoreError::Foreign { path: path(), problem: problem() },
            StoreError::Version { found: "3.0.0" },
            StoreError::Corrupt { what: "head", key: "w".into(), problem: problem() },
            StoreError::Event { key, seq: 1, source },
            StoreError::WriterTaken,
            StoreError::Recovering,
            StoreError::Injected("load"),
        ]
    }

    /// `docs/guide/errors.md` begins with this table; with `UPDATE_DOCS=1` the test writes it. What only the command says
    /// stands behind it, and has a test of its own.
    #[test]
    fn the_guide_has_every_code() {
        let mut text = "# Errors\n\nEvery code that a problem document carries, over HTTP and on the command line, \
                        with its status and its class ([what to do](http.md#errors)).\n\n| code | status | class | meaning |\n|---|---:|---|---|\n"
            .to_owned();
        for Row { code, status, class, title } in TABLE {
            let class = serde_json::to_value(class).unwrap();
            text += &format!("| `{code}` | {status} | `{}` | {title} |\n", class.as_str().unwrap());
        }
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/errors.md");
        let page = std::fs::read_to_string(&path).unwrap();
        let (own, command) = page.split_at(page.find("\n## ").unwrap_or(page.len()));
        if std::env::var_os("UPDATE_DOCS").is_some() {
            return std::fs::write(&path, text + command).unwrap();
        }
        assert_eq!(own, text, "run this test with UPDATE_DOCS=1");
    }

    #[test]
    fn no_code_stands_twice() {
        let codes: BTreeSet<_> = TABLE.iter().map(|row| row.code).collect();
        assert_eq!(codes.len(), TABLE.len());
    }

    #[test]
    fn every_error_of_the_engine_has_a_row_and_a_document() {
        let store = store_errors().into_iter().map(|error| Error::Store(Arc::new(error)));
        for error in errors().into_iter().chain(store) {
            let code = error.code();
            let row = find(code).unwrap_or_else(|| panic!("{code} has no row"));
            let problem = Problem::from(error);
            let text = serde_json::to_string(&problem.document()).unwrap();
            assert!(text.contains(&format!("\"type\":\"urn:steadfast:problem:{code}\"")), "{text}");
            assert!(text.contains(&format!("\"status\":{}", row.status)), "{text}");
            assert!(!text.contains("secret"), "an answer holds no contents: {text}");
        }
    }

    /// Refusals get their code where they are made, so the code itself is asked.
    #[test]
    fn every_code_that_the_sources_name_has_a_row() {
        let mut found = BTreeSet::new();
        for part in ["core", "store", "engine", "server"] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(part).join("src");
            codes_below(&folder, &mut found);
        }
        assert!(found.contains("invalid_tag") && found.contains("value_too_large"), "{found:?}");
        assert!(found.contains("sqlite_too_old") && found.contains("line_too_large"), "{found:?}");
        let absent: Vec<_> = found.iter().filter(|code| find(code).is_none()).collect();
        assert!(absent.is_empty(), "codes without a row: {absent:?}");
    }

    /// Codes stand before everything else in a refusal, last in a checked text, and behind an arrow in `code()`.
    fn codes_below(folder: &Path, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                codes_below(&path, found);
                continue;
            }
            let text = std::fs::read_to_string(&path).unwrap();
            let arrow =
                if path.ends_with("error.rs") || path.ends_with("contract.rs") { "=> \"" } else { "Invalid::new(" };
            for before in ["Invalid::new(", "Invalid::over(", "Problem::new(", ", \"invalid_", arrow] {
                for (at, _) in text.match_indices(before) {
                    let rest = text[at..].split_once('"').map_or("", |(_, rest)| rest);
                    let between = &text[at..at + text[at..].find('"').unwrap_or_default()];
                    let code = rest.split('"').next().unwrap_or_default();
                    let is_word =
                        !code.is_empty() && code.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_');
                    if is_word && between.trim_end().len() <= before.len() {
                        found.insert(code.to_owned());
                    }
                }
            }
        }
    }

    #[test]
    fn a_retry_is_never_announced_for_less_than_it_takes() {
        let header = |ms| {
            let response = Problem::from(Error::Overloaded { retry_after_ms: ms }).into_response();
            response.headers()[header::RETRY_AFTER].to_str().unwrap().to_owned()
        };
        assert_eq!([0, 1, 1_000, 1_001].map(header), ["1", "1", "1", "2"]);
    }
}
