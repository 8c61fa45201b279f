//! Server: the accept loop, what every request passes, and a stop that lets requests finish.
//!
//! The loop is our own because `axum::serve` waits for slow clients for ever. What ends a connection from within is told
//! in [`connection`](crate::connection); what ends it from without is here: the limit on their number, and the end of
//! the grace after a stop.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{MatchedPath, Request, State};
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::FutureExt;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use steadfast::{Engine, Error};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;
use tower::ServiceExt;

use crate::connection::{Activity, Answer, Guarded};
use crate::options::Options;
use crate::problem::Problem;
use crate::telemetry::Telemetry;
use crate::{admission, bulk, control, gate, health, look, outcome, signals, telemetry};

/// Refusals under way at once; further connections are closed without a word.
const REFUSALS_MAX: usize = 64;
/// How long a refused client has to read why.
const REFUSAL_TIME: Duration = Duration::from_secs(1);
/// Pauses after an error of accept, such as too many open files: the first, and the longest.
const ACCEPT_PAUSE: Duration = Duration::from_millis(10);
const ACCEPT_PAUSE_MAX: Duration = Duration::from_secs(1);
/// How often the samples of the histograms are folded; without it they would pile up between two scrapes.
const UPKEEP: Duration = Duration::from_secs(5);

/// Whether a server may and can listen on `address`; for callers that have work to do before they bind.
///
/// # Errors
/// [`ServeError`], the same that [`Server::bind`] would give.
pub fn may_listen(address: SocketAddr) -> Result<(), ServeError> {
    if !address.ip().is_loopback() {
        return Err(ServeError::NotLoopback { address });
    }
    std::net::TcpListener::bind(address).map(drop).map_err(|source| ServeError::Bind { address, source })
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// The address can be reached from other machines.
    #[error(
        "{address} is no loopback address; there are no keys yet, so whoever reaches the server may do everything: listen on 127.0.0.1 or [::1]"
    )]
    NotLoopback {
        /// The address that was asked for.
        address: SocketAddr,
    },
    /// The address cannot be listened on.
    #[error("cannot listen on {address}; stop what listens there, or give another port")]
    Bind {
        /// The address that was asked for.
        address: SocketAddr,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

impl ServeError {
    /// The stable code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::NotLoopback { .. } => "not_loopback",
            Self::Bind { .. } => "bind_failed",
        }
    }
}

/// What the routes share.
#[derive(Debug)]
pub(crate) struct App {
    pub(crate) engine: Engine,
    pub(crate) options: Options,
    pub(crate) telemetry: Telemetry,
    /// True once the server was told to stop: what waits answers at once.
    pub(crate) stopping: watch::Sender<bool>,
    /// Room for large bodies, in KiB.
    pub(crate) body_room: Arc<Semaphore>,
    /// Room for bulks.
    pub(crate) bulk_room: Arc<Semaphore>,
    /// Room for connections.
    connection_room: Arc<Semaphore>,
}

impl App {
    /// Looks at the store, within the time that a request may take.
    pub(crate) async fn look<T: Send + 'static>(
        &self,
        look: impl FnOnce(&dyn steadfast::store::Reader) -> Result<T, steadfast::store::StoreError> + Send + 'static,
    ) -> Result<T, Problem> {
        match tokio::time::timeout(self.options.request_timeout, self.engine.look(look)).await {
            Ok(looked) => Ok(looked?),
            Err(_) => Err(Problem::new("request_timeout", "the look at the store took too long; try again later")
                .retry_after_ms(1_000)),
        }
    }

    /// Runs a call that changes something to its end, whether or not its client stays, and waits for it within the time
    /// that a request may take; after that nobody knows what becomes of it.
    ///
    /// A start that is dropped half-way could be granted its first step with nobody there to run it.
    pub(crate) async fn change<T: Send + 'static>(
        &self,
        id: &str,
        call: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<T, Problem> {
        match tokio::time::timeout(self.options.request_timeout, tokio::spawn(call)).await {
            Ok(Ok(Err(Error::OutcomeUnknown { .. }))) | Err(_) => Err(Problem::unknown_outcome(id)),
            Ok(Ok(result)) => Ok(result?),
            Ok(Err(_)) => {
                tracing::error!("a change ended by a panic");
                Err(Problem::internal().id(id))
            }
        }
    }

    pub(crate) async fn stopped(&self) {
        // The sender lives as long as `self`.
        let _ = self.stopping.subscribe().wait_for(|stopping| *stopping).await;
    }

    pub(crate) fn connections(&self) -> usize {
        self.options.connections_max - self.connection_room.available_permits()
    }
}

/// An engine behind an address.
#[derive(Debug)]
pub struct Server {
    listener: TcpListener,
    address: SocketAddr,
    app: Arc<App>,
}

impl Server {
    /// Takes the address. Connections are accepted from now on and answered once the server runs.
    ///
    /// # Errors
    /// [`ServeError::NotLoopback`] for an address that other machines can reach, [`ServeError::Bind`].
    pub async fn bind(engine: Engine, options: Options) -> Result<Self, ServeError> {
        let address = options.listen;
        may_listen(address)?;
        let listener = TcpListener::bind(address).await.map_err(|source| ServeError::Bind { address, source })?;
        let address = listener.local_addr().map_err(|source| ServeError::Bind { address, source })?;
        let app = App {
            engine,
            telemetry: Telemetry::install(),
            stopping: watch::channel(false).0,
            body_room: Arc::new(Semaphore::new((options.body_memory >> 10).min(Semaphore::MAX_PERMITS))),
            bulk_room: Arc::new(Semaphore::new(options.bulks_max.min(Semaphore::MAX_PERMITS))),
            connection_room: Arc::new(Semaphore::new(options.connections_max.min(Semaphore::MAX_PERMITS))),
            options,
        };
        Ok(Self { listener, address, app: Arc::new(app) })
    }

    /// The address in use, with the port that was taken.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop`. Then it accepts nothing more, tells those who wait for a result to come again, and lets
    /// the other requests in flight finish within [`Options::grace`]. The engine goes on.
    pub async fn run(self, stop: impl Future<Output = ()> + Send) {
        let Self { listener, app, .. } = self;
        let router = router(&app);
        let refusals = Arc::new(Semaphore::new(REFUSALS_MAX));
        let refusal = refusal();
        let mut connections = JoinSet::new();
        let mut upkeep = tokio::time::interval(UPKEEP);
        let mut pause = ACCEPT_PAUSE;
        let mut stop = pin!(stop);
        loop {
            let socket = tokio::select! {
                () = &mut stop => break,
                Some(_) = connections.join_next(), if !connections.is_empty() => continue,
                _ = upkeep.tick() => {
                    app.telemetry.upkeep();
                    continue;
                }
                socket = accept(&listener, &mut pause) => socket,
            };
            match app.connection_room.clone().try_acquire_owned() {
                Ok(room) => {
                    connections.spawn(serve(socket, router.clone(), app.clone(), room));
                }
                Err(_) => {
                    metrics::counter!("steadfast_http_connections_refused_total").increment(1);
                    if let Ok(room) = refusals.clone().try_acquire_owned() {
                        connections.spawn(refuse(socket, refusal.clone(), room));
                    }
                }
            }
        }
        drop(listener);
        app.stopping.send_replace(true);
        let finished = async { while connections.join_next().await.is_some() {} };
        if tokio::time::timeout(app.options.grace, finished).await.is_err() {
            tracing::warn!(connections = connections.len(), "requests are cut off because the grace is over");
            connections.shutdown().await;
        }
    }
}

/// Where connections come from; a test has its own.
trait Listen {
    fn accept(&self) -> impl Future<Output = io::Result<TcpStream>> + Send;
}

impl Listen for TcpListener {
    async fn accept(&self) -> io::Result<TcpStream> {
        TcpListener::accept(self).await.map(|(socket, _)| socket)
    }
}

/// The next connection, whatever goes wrong before it.
async fn accept(listener: &impl Listen, pause: &mut Duration) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok(socket) => {
                *pause = ACCEPT_PAUSE;
                return socket;
            }
            // The client was faster than we were: its fault, and no reason to wait.
            Err(error)
                if matches!(
                    error.kind(),
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::Interrupted
                ) => {}
            // Too many open files, or no memory. The connection stays in the queue, and the others go on meanwhile.
            Err(error) => {
                metrics::counter!("steadfast_http_accept_errors_total").increment(1);
                if *pause == ACCEPT_PAUSE {
                    tracing::warn!(%error, "connections cannot be accepted; it is tried again");
                }
                tokio::time::sleep(*pause).await;
                *pause = (*pause * 2).min(ACCEPT_PAUSE_MAX);
            }
        }
    }
}

/// Serves one connection to its end.
async fn serve(socket: TcpStream, router: Router, app: Arc<App>, _room: OwnedSemaphorePermit) {
    // Answers are small and waited for.
    let _ = socket.set_nodelay(true);
    let options = &app.options;
    let activity = Arc::new(Activity::default());
    let io = TokioIo::new(Guarded::new(socket, activity.clone(), options));
    let service = {
        let activity = activity.clone();
        service_fn(move |request: hyper::Request<Incoming>| {
            let serving = activity.begin();
            let router = router.clone();
            async move {
                let Ok(response) = router.oneshot(request).await;
                Ok::<_, Infallible>(response.map(|body| Answer::new(body, serving)))
            }
        })
    };
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new())
        // The guard of the socket comes first; this one makes hyper look at the socket when a request has ended.
        .header_read_timeout(options.header_timeout.saturating_add(options.idle_timeout))
        .max_headers(options.headers_max)
        .max_buf_size(options.header_bytes_max.max(8 << 10));
    let mut connection = pin!(http.serve_connection(io, service));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = app.stopped() => {
            if activity.is_fresh() {
                return;
            }
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "a connection ended early");
    }
}

/// The answer to one connection too many, complete.
fn refusal() -> bytes::Bytes {
    let problem = Problem::new("too_many_connections", "too many connections are open; close some, or try again later")
        .retry_after_ms(1_000);
    let body = serde_json::to_string(&problem.document()).expect("strings and integers serialize");
    format!(
        "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/problem+json\r\ncache-control: no-store\r\n\
         x-content-type-options: nosniff\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
    .into()
}

/// Tells a client that there is no room, and gives it a moment to read that.
async fn refuse(mut socket: TcpStream, refusal: bytes::Bytes, _room: OwnedSemaphorePermit) {
    let told = async {
        socket.write_all(&refusal).await?;
        socket.shutdown().await?;
        // Closing on bytes that were not read would reset the connection and take the answer with it.
        let mut discarded = [0; 4 << 10];
        while socket.read(&mut discarded).await? > 0 {}
        Ok::<_, io::Error>(())
    };
    let _ = tokio::time::timeout(REFUSAL_TIME, told).await;
}

fn router(app: &Arc<App>) -> Router {
    Router::new()
        .route("/v1/workflows", post(admission::start).get(look::list))
        // A workflow may be called "bulk": reading it goes on as for any other.
        .route("/v1/workflows/bulk", post(bulk::bulk).get(look::workflow_called_bulk))
        .route("/v1/workflows/{id}", get(look::workflow))
        .route("/v1/workflows/{id}/events", get(look::events))
        .route("/v1/workflows/{id}/scratchpad", get(look::scratchpad))
        .route("/v1/workflows/{id}/scratchpad/{key}", get(look::variable))
        .route("/v1/workflows/{id}/result", get(outcome::result))
        .route("/v1/workflows/{id}/why", get(look::why))
        .route("/v1/workflows/{id}/signals", post(signals::send).get(signals::pending))
        .route("/v1/workflows/{id}/cancel", post(control::cancel))
        .route("/healthz", get(health::alive))
        .route("/readyz", get(health::ready))
        .route("/metrics", get(telemetry::scrape))
        .fallback(no_route)
        .method_not_allowed_fallback(no_method)
        .layer(axum::middleware::from_fn_with_state(app.clone(), edge))
        .with_state(app.clone())
}

async fn no_route(request: Request) -> Response {
    gate::refuse(request, Problem::new("not_found", "there is no such route; the routes stand below /v1")).await
}

async fn no_method(request: Request) -> Response {
    gate::refuse(request, Problem::new("method_not_allowed", "see the header Allow for the methods of this route"))
        .await
}

/// What every request passes on its way in and out.
async fn edge(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let began = Instant::now();
    let route = request.extensions().get::<MatchedPath>().cloned();
    let method = telemetry::method(request.method());
    let mut response = match gate::check(&request) {
        Err(problem) => gate::refuse(request, problem).await,
        Ok(()) => match AssertUnwindSafe(next.run(request)).catch_unwind().await {
            Ok(response) => response,
            Err(_) => {
                metrics::counter!("steadfast_http_panics_total").increment(1);
                tracing::error!(
                    method,
                    route = route.as_ref().map_or("", |route| route.as_str()),
                    "a handler panicked"
                );
                Problem::internal().into_response()
            }
        },
    };
    let headers = response.headers_mut();
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    app.telemetry.answered(method, route.as_ref().map(MatchedPath::as_str), response.status(), began.elapsed());
    response
}

/// The answer to what is accepted once: new, or accepted before.
pub(crate) fn accepted(replay: bool, body: &impl serde::Serialize) -> Result<Response, Problem> {
    if !replay {
        return json(StatusCode::CREATED, body);
    }
    let mut response = json(StatusCode::OK, body)?;
    let name = HeaderName::from_static("idempotent-replay");
    response.headers_mut().insert(name, HeaderValue::from_static("true"));
    Ok(response)
}

/// An answer with a JSON body.
pub(crate) fn json(status: StatusCode, body: &impl serde::Serialize) -> Result<Response, Problem> {
    // Only a stored text that was damaged does not serialize.
    let bytes = serde_json::to_vec(body).map_err(|_| Problem::internal())?;
    let mut response = (status, Body::from(bytes)).into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    Ok(response)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use http_body_util::BodyExt;
    use steadfast::store::memory::MemoryStore;

    use super::*;

    struct Scripted {
        listener: TcpListener,
        errors: Mutex<Vec<io::Error>>,
    }

    impl Listen for Scripted {
        async fn accept(&self) -> io::Result<TcpStream> {
            let error = self.errors.lock().unwrap().pop();
            match error {
                Some(error) => Err(error),
                None => Listen::accept(&self.listener).await,
            }
        }
    }

    #[tokio::test]
    async fn errors_of_accept_are_waited_out() {
        const TOO_MANY_FILES: i32 = 24;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let errors = [TOO_MANY_FILES, TOO_MANY_FILES, TOO_MANY_FILES].map(io::Error::from_raw_os_error);
        let aborted = io::Error::from(io::ErrorKind::ConnectionAborted);
        let errors = Mutex::new(errors.into_iter().chain([aborted]).collect());
        let scripted = Scripted { listener, errors };
        let client = tokio::spawn(TcpStream::connect(address));
        let (mut pause, began) = (ACCEPT_PAUSE, Instant::now());
        let accepted = accept(&scripted, &mut pause).await;
        assert_eq!(accepted.peer_addr().unwrap(), client.await.unwrap().unwrap().local_addr().unwrap());
        assert!(began.elapsed() >= ACCEPT_PAUSE * 7, "10, 20 and 40 ms");
        assert_eq!(pause, ACCEPT_PAUSE, "the next error begins anew");
    }

    #[tokio::test]
    async fn a_panic_is_a_problem_and_no_more() {
        async fn panics() -> Response {
            panic!("of a handler, on purpose")
        }
        let clock = Arc::new(steadfast::store::clock::SystemClock::new());
        let engine = Engine::on(MemoryStore::new(clock)).run().unwrap();
        let server = Server::bind(engine, Options::on(([127, 0, 0, 1], 0).into())).await.unwrap();
        let router = Router::new()
            .route("/panics", get(panics))
            .layer(axum::middleware::from_fn_with_state(server.app.clone(), edge));
        for _ in 0..2 {
            let request = Request::get("/panics").header(header::HOST, "localhost").body(Body::empty()).unwrap();
            let Ok(response) = router.clone().oneshot(request).await;
            assert_eq!(response.status(), StatusCode::INTERNAL_SERVER_ERROR);
            let body = response.into_body().collect().await.unwrap().to_bytes();
            let text = std::str::from_utf8(&body).unwrap();
            assert!(text.contains("\"code\":\"internal\"") && !text.contains("purpose"), "{text}");
        }
    }
}
