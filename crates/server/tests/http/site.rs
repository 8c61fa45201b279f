//! Site: an engine with a few definitions, a server before it, and a client that asks.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use steadfast::store::Store;
use steadfast::store::faults::{Faulty, Plan};
use steadfast::store::postgres::PostgresStore;
use steadfast::store::sqlite::SqliteStore;
use steadfast::{Builder, Ctx, Engine, Json, StepResult, done, fail, step, wait_for};
use steadfast_pgtest::Database;
use steadfast_server::{Options, Server};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinHandle;

/// No test waits longer for anything; what takes so long has failed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

/// Awaits with patience.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("waited in vain for {what}"))
}

/// Holds the steps of the definition `hold`, and tells when one has begun.
#[derive(Debug)]
pub(crate) struct Door {
    pub(crate) entered: Semaphore,
    pub(crate) open: Semaphore,
}

impl Door {
    /// Waits until a step stands before the door.
    pub(crate) async fn entered(&self) {
        soon("a step to begin", self.entered.acquire()).await.unwrap().forget();
    }

    /// Lets one step through.
    pub(crate) fn let_one_through(&self) {
        self.open.add_permits(1);
    }
}

pub(crate) struct Site {
    pub(crate) engine: Engine,
    pub(crate) address: SocketAddr,
    pub(crate) door: Arc<Door>,
    client: reqwest::Client,
    stop: Option<oneshot::Sender<()>>,
    running: JoinHandle<()>,
}

/// Bounds as they come, on a free port.
pub(crate) fn options() -> Options {
    Options::on(([127, 0, 0, 1], 0).into())
}

/// An engine to be, on the store of a database.
pub(crate) fn open(database: &Database) -> Builder {
    Engine::open(&database.url()).unwrap()
}

/// The same on a store that fails where the plan says.
pub(crate) fn faulty(database: &Database) -> (Builder, Plan) {
    let store: Box<dyn Store> = match database.file() {
        Some(path) => Box::new(SqliteStore::open(path).unwrap()),
        None => Box::new(PostgresStore::open(&database.url()).unwrap()),
    };
    let store = Faulty::new(store);
    let plan = store.plan();
    (Engine::on(store), plan)
}

impl Site {
    /// With the definitions below and 8 workflows at once.
    pub(crate) async fn new(database: &Database) -> Self {
        Self::with(options(), open(database)).await
    }

    /// With an engine that runs nothing.
    pub(crate) async fn idle(database: &Database, options: Options) -> Self {
        Self::with(options, open(database).concurrency(0)).await
    }

    pub(crate) async fn with(options: Options, builder: Builder) -> Self {
        let door = Arc::new(Door { entered: Semaphore::new(0), open: Semaphore::new(0) });
        let at_the_door = door.clone();
        let engine = builder
            .register("echo", |ctx: Ctx| async move { Ok(done(ctx.json("input").await?)) })
            .register("refuse", |_| async { Ok(fail("boom", "it broke")) })
            .register("write", write)
            .register("nap", |ctx: Ctx| async move {
                match ctx.step() {
                    // For so many milliseconds, or an hour.
                    "start" => {
                        let ms = ctx.input::<Option<u64>>().await?.unwrap_or(3_600_000);
                        Ok(step("later").after(Duration::from_millis(ms)))
                    }
                    _ => Ok(done(())),
                }
            })
            .register("ask", |ctx: Ctx| async move {
                match ctx.step() {
                    "start" => Ok(wait_for("word").then("told").timeout(Duration::from_secs(3_600), "untold")),
                    _ => Ok(done(ctx.signal().await?.map(|signal| signal.payload))),
                }
            })
            .register("hold", move |ctx: Ctx| {
                let door = at_the_door.clone();
                async move {
                    ctx.heartbeat(&"at the door")?;
                    door.entered.add_permits(1);
                    tokio::select! {
                        through = door.open.acquire() => through.map_err(|_| steadfast::Failure::terminal("shut", ""))?.forget(),
                        () = ctx.cancelled() => {}
                    }
                    Ok(done("through"))
                }
            })
            .run()
            .unwrap();
        Self::before(engine, options, door).await
    }

    /// One more server before an engine.
    pub(crate) async fn beside(&self, options: Options) -> Self {
        Self::before(self.engine.clone(), options, self.door.clone()).await
    }

    async fn before(engine: Engine, options: Options, door: Arc<Door>) -> Self {
        let server = Server::bind(engine.clone(), options).await.unwrap();
        let address = server.address();
        let (stop, stopped) = oneshot::channel();
        let running = tokio::spawn(server.run(async {
            let _ = stopped.await;
        }));
        let client = reqwest::Client::builder().no_proxy().timeout(PATIENCE).build().unwrap();
        Self { engine, address, door, client, stop: Some(stop), running }
    }

    /// Tells the server to stop, without waiting.
    pub(crate) fn stop(&mut self) {
        let _ = self.stop.take().expect("stopped once").send(());
    }

    /// Waits until the server has stopped.
    pub(crate) async fn stopped(self) {
        soon("the server to stop", self.running).await.unwrap();
    }

    pub(crate) fn request(&self, method: &str, path: &str) -> reqwest::RequestBuilder {
        self.client.request(method.parse().unwrap(), format!("http://{}{path}", self.address))
    }

    pub(crate) async fn get(&self, path: &str) -> Answer {
        Answer::of(self.request("GET", path)).await
    }

    pub(crate) async fn post(&self, path: &str, body: impl Into<reqwest::Body>) -> Answer {
        Answer::of(self.request("POST", path).header("content-type", "application/json").body(body)).await
    }

    pub(crate) async fn start(&self, body: impl Into<reqwest::Body>) -> Answer {
        self.post("/v1/workflows", body).await
    }

    pub(crate) async fn bulk(&self, body: impl Into<reqwest::Body>) -> Answer {
        let request = self.request("POST", "/v1/workflows/bulk").header("content-type", "application/x-ndjson");
        Answer::of(request.body(body)).await
    }

    /// Every id there is.
    pub(crate) async fn ids(&self) -> Vec<String> {
        let (mut ids, mut next) = (Vec::new(), String::new());
        loop {
            let page = self.get(&format!("/v1/workflows?limit=500{next}")).await.json();
            ids.extend(page["workflows"].as_array().unwrap().iter().map(|item| word(&item["id"])));
            match page["next"].as_str() {
                Some(cursor) => next = format!("&before={cursor}"),
                None => return ids,
            }
        }
    }

    /// Waits for the end of a workflow.
    pub(crate) async fn result(&self, id: &str) -> Answer {
        self.get(&format!("/v1/workflows/{id}/result?wait_ms=15000")).await
    }

    /// A bare connection.
    pub(crate) async fn connect(&self) -> Raw {
        Raw(TcpStream::connect(self.address).await.unwrap())
    }
}

async fn write(ctx: Ctx) -> StepResult {
    match ctx.step() {
        "start" => {
            ctx.set_json("exact", Json::parse("1.10")?)?;
            ctx.set("b", "bee")?;
            Ok(step("second"))
        }
        _ => Ok(done(())),
    }
}

/// The text of a JSON string.
pub(crate) fn word(value: &Value) -> String {
    value.as_str().unwrap_or_else(|| panic!("{value} is no string")).to_owned()
}

/// What was answered.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: reqwest::header::HeaderMap,
    pub(crate) body: String,
}

impl Answer {
    pub(crate) async fn of(request: reqwest::RequestBuilder) -> Self {
        let response = request.send().await.unwrap();
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        Self { status, headers, body: response.text().await.unwrap() }
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.body).unwrap_or_else(|error| panic!("{error} in {}", self.body))
    }

    /// Status, code, field and limit of a problem, after checking what all problems have in common.
    pub(crate) fn problem(&self) -> String {
        assert_eq!(self.header("content-type"), "application/problem+json", "{self:?}");
        problem(self.status, &self.json())
    }
}

/// The same of a problem document, wherever it stands.
pub(crate) fn problem(status: u16, document: &Value) -> String {
    let code = word(&document["code"]);
    assert_eq!(document["type"], format!("urn:steadfast:problem:{code}"));
    assert_eq!(document["status"], status);
    let row = steadfast_server::problem::find(&code).unwrap_or_else(|| panic!("{code} has no row"));
    assert_eq!(document["title"], row.title);
    assert_eq!(row.status, status);
    assert!(!word(&document["detail"]).is_empty());
    let mut text = format!("{status} {code}");
    if let Some(field) = document["field"].as_str() {
        text += &format!(" {field}");
    }
    if let Some(limit) = document["limit"].as_u64() {
        text += &format!(" {limit}");
    }
    text
}

/// A bare connection, for what no decent client does.
pub(crate) struct Raw(pub(crate) TcpStream);

impl Raw {
    pub(crate) async fn send(&mut self, text: &str) {
        self.0.write_all(text.as_bytes()).await.unwrap();
    }

    /// Sends as long as the other side takes it.
    pub(crate) async fn try_send(&mut self, text: &str) -> bool {
        self.0.write_all(text.as_bytes()).await.is_ok()
    }

    /// Sends a chunk of a body.
    pub(crate) async fn chunk(&mut self, text: &str) {
        self.send(&format!("{:x}\r\n{text}\r\n", text.len())).await;
    }

    /// Reads until `end` has come.
    pub(crate) async fn read_until(&mut self, end: &str) -> String {
        let (mut read, mut searched) = (Vec::new(), 0);
        let mut buffer = [0; 4 << 10];
        // Searched once only: an answer of several MB comes in a thousand pieces.
        while !read[searched..].windows(end.len()).any(|part| part == end.as_bytes()) {
            searched = read.len().saturating_sub(end.len());
            let n = soon(end, self.0.read(&mut buffer)).await.unwrap();
            assert!(n > 0, "closed before {end:?} came: {}", String::from_utf8_lossy(&read));
            read.extend_from_slice(&buffer[..n]);
        }
        String::from_utf8(read).unwrap()
    }

    /// Reads until the other side closes. A reset counts as closed too.
    pub(crate) async fn read_to_end(&mut self) -> String {
        let mut read = Vec::new();
        let _ = soon("the connection to be closed", self.0.read_to_end(&mut read)).await;
        String::from_utf8(read).unwrap()
    }
}
