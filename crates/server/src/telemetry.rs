//! Telemetry: counting what the process does, and showing it to Prometheus.
//!
//! Counters and histograms of every part go through one recorder for the whole process. What is read off an engine at
//! the moment of a scrape (queue, store) belongs to the one server that is asked, so it is written beside them.

use std::fmt::Write;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use axum::extract::State;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};

use crate::server::App;

/// From a look in memory to a long poll.
const SECONDS: &[f64] =
    &[0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];
/// A batch holds 1 to 1,024 commands.
const COMMANDS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0];

/// The way to the process's recorder.
#[derive(Debug, Clone)]
pub(crate) struct Telemetry {
    prometheus: PrometheusHandle,
}

impl Telemetry {
    /// The recorder of this process, which the first server installs.
    pub(crate) fn install() -> Self {
        static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();
        let install = || {
            let buckets = PrometheusBuilder::new()
                .set_buckets_for_metric(Matcher::Suffix("_seconds".to_owned()), SECONDS)
                .and_then(|builder| builder.set_buckets_for_metric(Matcher::Suffix("_commands".to_owned()), COMMANDS))
                .expect("the buckets are not empty");
            let recorder = buckets.build_recorder();
            let handle = recorder.handle();
            if metrics::set_global_recorder(recorder).is_err() {
                tracing::warn!("the process counts with a recorder of its own; /metrics shows the gauges alone");
            }
            describe();
            handle
        };
        Self { prometheus: RECORDER.get_or_init(install).clone() }
    }

    /// Folds the samples that gathered.
    pub(crate) fn upkeep(&self) {
        self.prometheus.run_upkeep();
    }

    /// Counts an answer. Only words of ours become labels, so no client can make series.
    pub(crate) fn answered(&self, method: &'static str, route: Option<&str>, status: StatusCode, took: Duration) {
        let route = route.unwrap_or("unmatched").to_owned();
        let status = status.as_str().to_owned();
        metrics::histogram!("steadfast_http_request_seconds", "method" => method, "route" => route.clone())
            .record(took.as_secs_f64());
        metrics::counter!("steadfast_http_requests_total", "method" => method, "route" => route, "status" => status)
            .increment(1);
    }
}

fn describe() {
    metrics::describe_counter!("steadfast_http_requests_total", "Answered requests");
    metrics::describe_histogram!(
        "steadfast_http_request_seconds",
        "Time from the head of a request to that of its answer"
    );
    metrics::describe_counter!("steadfast_http_connections_refused_total", "Connections closed for want of room");
    metrics::describe_counter!("steadfast_http_accept_errors_total", "Errors of accept, waited out");
    metrics::describe_counter!("steadfast_http_panics_total", "Handlers that panicked");
    metrics::describe_counter!("steadfast_commits_total", "Commits");
    metrics::describe_counter!("steadfast_commits_unknown_total", "Commits of unknown outcome");
    metrics::describe_counter!("steadfast_events_total", "Events written");
    metrics::describe_counter!("steadfast_left_out_total", "Times that a workflow which cannot be saved was left out");
    metrics::describe_counter!("steadfast_raced_total", "Batches decided anew because another node came first");
    metrics::describe_histogram!(
        "steadfast_timer_lateness_seconds",
        "From when a wait was over to when that was found"
    );
    metrics::describe_histogram!("steadfast_batch_commands", "Commands in one commit");
    metrics::describe_histogram!("steadfast_commit_seconds", "Time of one commit, loading and deciding included");
}

/// The label of a method; what is not standard shares one.
pub(crate) fn method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "other",
    }
}

/// `GET /metrics`
pub(crate) async fn scrape(State(app): State<Arc<App>>) -> Response {
    app.telemetry.upkeep();
    let mut text = app.telemetry.prometheus.render();
    let (waiting, running) = app.engine.load();
    gauge(&mut text, "steadfast_waiting_commands", "Commands that wait for the committer", waiting as u64);
    gauge(&mut text, "steadfast_running_workflows", "Workflows whose step runs in this process", running as u64);
    gauge(&mut text, "steadfast_http_connections", "Open connections", app.connections() as u64);
    // A store that cannot tell is missing here, as is usual for what is not known.
    if let Ok(bytes) = app.look(|reader| reader.bytes()).await {
        gauge(&mut text, "steadfast_store_bytes", "Bytes the store takes", bytes);
    }
    if let Ok(Some(oldest)) = app.look(|reader| reader.oldest_snapshot()).await {
        let (name, help) =
            ("steadfast_oldest_snapshot_transactions", "Transactions since the oldest snapshot held by any session");
        gauge(&mut text, name, help, oldest.transactions);
        if let Some(age) = oldest.age {
            let (name, help) =
                ("steadfast_oldest_snapshot_seconds", "Seconds since the oldest transaction with a snapshot began");
            gauge(&mut text, name, help, age.as_secs());
        }
    }
    let mut response = (StatusCode::OK, text).into_response();
    let kind = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, kind);
    response
}

fn gauge(text: &mut String, name: &str, help: &str, value: u64) {
    let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} gauge\n{name} {value}");
}
