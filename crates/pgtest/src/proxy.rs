//! A TCP proxy that fails on demand.
//!
//! Each connection has a thread for either direction, and everything is decided between reading and passing on.
//!
//! # The answer to a COMMIT
//!
//! A client may send much before it waits. The server closes each of its batches with one ReadyForQuery: a start, a
//! simple query, and every Sync makes one. So counting what was asked and what was closed tells which batch an answer
//! belongs to, and an answer in the batch of the COMMIT that says that it is done or has failed is the one to lose.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::net::sockopt::set_socket_linger;

use crate::program::wait;
use crate::url;
use crate::wire::{Commits, Kind, Message, Stream, answers_commit};

/// Where a connection is cut that is about to commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// The COMMIT does not reach the server: nothing is committed.
    Before,
    /// The server has answered the COMMIT, and the answer does not reach the client: what was to be committed is.
    After,
}

/// A TCP proxy on 127.0.0.1 before a PostgreSQL, which does no harm until it is told to.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    shared: Arc<Shared>,
    accepting: Option<JoinHandle<()>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Told when a stall ends or a connection is cut.
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    target: u16,
    closed: bool,
    refuse: bool,
    stalled: bool,
    /// What the next COMMITs meet, and how many of them.
    order: Option<(Cut, usize)>,
    cuts: usize,
    connections: HashMap<u64, Arc<Connection>>,
    next: u64,
}

impl Proxy {
    /// Starts a proxy before the PostgreSQL on this port of 127.0.0.1.
    pub fn start(target_port: u16) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).expect("some port is free");
        let port = listener.local_addr().expect("a bound socket has an address").port();
        let state = State {
            target: target_port,
            closed: false,
            refuse: false,
            stalled: false,
            order: None,
            cuts: 0,
            connections: HashMap::new(),
            next: 0,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let accepting = Some(thread::spawn({
            let shared = Arc::clone(&shared);
            move || accept(&listener, &shared)
        }));
        Self { port, shared, accepting }
    }

    /// The port on 127.0.0.1.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of the database behind it; `params` is what stands after the question mark.
    pub fn url(&self, params: &str) -> String {
        url(self.port, params)
    }

    /// Sends new connections to another port, and cuts those that there are.
    pub fn retarget(&self, port: u16) {
        self.shared.lock().target = port;
        self.sever();
    }

    /// Cuts every connection; the client's end is reset. None is left when this returns.
    pub fn sever(&self) {
        let mut state = self.shared.lock();
        let all: Vec<_> = state.connections.drain().map(|(_, connection)| connection).collect();
        all.iter().for_each(|connection| connection.cut());
        drop(state);
        self.shared.changed.notify_all();
        for connection in &all {
            // The end of the last thread closes the sockets. One that waits for a reader who does not read is woken
            // by the harder way, at the price of an orderly end before the reset.
            if !wait(Duration::from_millis(200), || Arc::strong_count(connection) == 1) {
                connection.each(|socket| drop(socket.shutdown(Shutdown::Both)));
                wait(Duration::from_millis(200), || Arc::strong_count(connection) == 1);
            }
        }
    }

    /// Whether new connections are closed as soon as they are accepted.
    pub fn refuse(&self, refuse: bool) {
        self.shared.lock().refuse = refuse;
    }

    /// Whether nothing passes, in connections that stay open and in new ones, which are accepted.
    pub fn stall(&self, stall: bool) {
        self.shared.lock().stalled = stall;
        self.shared.changed.notify_all();
    }

    /// Cuts the connections of the next `count` COMMITs of any client. It replaces an order given before.
    pub fn cut_commits(&self, cut: Cut, count: usize) {
        self.shared.lock().order = Some((cut, count));
    }

    /// How many connections were cut at a COMMIT so far.
    pub fn cuts(&self) -> usize {
        self.shared.lock().cuts
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.lock().closed = true;
        // Accepting waits for somebody to come.
        drop(TcpStream::connect(("127.0.0.1", self.port)));
        drop(self.accepting.take().expect("it is joined once").join());
        self.sever();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no thread panics while it holds the state")
    }

    /// Waits until a stall ends; whether the connection still stands then.
    fn pass(&self, connection: &Connection) -> bool {
        let waits = |state: &mut State| state.stalled && !connection.is_cut();
        drop(self.changed.wait_while(self.lock(), waits).expect("no thread panics while it holds the state"));
        !connection.is_cut()
    }

    /// Cuts a connection at its COMMIT. Who sees it cut finds it counted.
    fn cut_at_commit(&self, connection: &Connection) {
        let mut state = self.lock();
        state.cuts += 1;
        connection.cut();
        drop(state);
        self.changed.notify_all();
    }

    /// What a COMMIT that was just read meets.
    fn take_order(&self) -> Option<Cut> {
        let mut state = self.lock();
        let (cut, left) = state.order.take()?;
        state.order = (left > 1).then(|| (cut, left - 1));
        (left > 0).then_some(cut)
    }
}

fn accept(listener: &TcpListener, shared: &Arc<Shared>) {
    loop {
        let Ok((client, _)) = listener.accept() else { continue };
        let mut state = shared.lock();
        if state.closed {
            return;
        }
        if state.refuse {
            continue;
        }
        // Registered under the same lock that gives the target: whoever changes it finds this one to cut.
        let id = state.next;
        state.next += 1;
        let connection = Arc::new(Connection::new(client));
        state.connections.insert(id, Arc::clone(&connection));
        let target = state.target;
        drop(state);
        let shared = Arc::clone(shared);
        thread::spawn(move || {
            drop(serve(&shared, connection, target));
            shared.lock().connections.remove(&id);
        });
    }
}

/// A client and its server.
#[derive(Debug)]
struct Connection {
    client: TcpStream,
    server: OnceLock<TcpStream>,
    cut: AtomicBool,
    progress: Mutex<Progress>,
}

/// How far the conversation is, see the module's page.
#[derive(Debug, Default)]
struct Progress {
    /// Wishes for encryption that the server has not answered yet.
    wishes: usize,
    /// How many batches the client has ended.
    asked: u64,
    /// How many batches the server has closed.
    closed: u64,
    /// The batch of the COMMIT whose answer is to be lost, counted from one.
    losing: Option<u64>,
}

impl Connection {
    fn new(client: TcpStream) -> Self {
        Self { client, server: OnceLock::new(), cut: AtomicBool::new(false), progress: Mutex::new(Progress::default()) }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().expect("no thread panics while it holds the progress")
    }

    fn is_cut(&self) -> bool {
        self.cut.load(Ordering::SeqCst)
    }

    fn each(&self, act: impl Fn(&TcpStream)) {
        act(&self.client);
        self.server.get().into_iter().for_each(act);
    }

    /// Makes both threads end without another byte to the client, whose end is reset when the last one closes it.
    ///
    /// Under the lock of the state, or a thread about to wait for the end of a stall would not see it.
    fn cut(&self) {
        self.cut.store(true, Ordering::SeqCst);
        let _ = set_socket_linger(&self.client, Some(Duration::ZERO));
        // This wakes our own reading and tells the other end nothing.
        self.each(|socket| drop(socket.shutdown(Shutdown::Read)));
    }
}

/// Serves one connection to its end.
fn serve(shared: &Arc<Shared>, connection: Arc<Connection>, target: u16) -> io::Result<()> {
    if !shared.pass(&connection) {
        return Ok(());
    }
    let server = TcpStream::connect(("127.0.0.1", target))?;
    server.set_nodelay(true)?;
    connection.client.set_nodelay(true)?;
    connection.server.set(server).expect("a connection has one server");
    // One who cut it before found no server to wake us by.
    if connection.is_cut() {
        return Ok(());
    }
    let answers = thread::spawn({
        let (shared, connection) = (Arc::clone(shared), Arc::clone(&connection));
        move || {
            drop(from_server(&shared, &connection));
            // Without a server there is nobody to ask. A cut client shall see no orderly end.
            if !connection.is_cut() {
                drop(connection.client.shutdown(Shutdown::Both));
            }
        }
    });
    drop(from_client(shared, &connection));
    if let Some(server) = connection.server.get() {
        drop(server.shutdown(Shutdown::Write));
    }
    drop(answers.join());
    Ok(())
}

/// Reads what there is and puts it into the stream; whether to go on.
fn read(shared: &Shared, connection: &Connection, mut from: &TcpStream, stream: &mut Stream) -> io::Result<bool> {
    let mut piece = [0; 16 * 1024];
    let length = from.read(&mut piece)?;
    stream.push(&piece[..length]);
    Ok(length > 0 && shared.pass(connection))
}

/// Passes on what the client says.
fn from_client(shared: &Shared, connection: &Connection) -> io::Result<()> {
    let mut server = connection.server.get().expect("it is set before the threads start");
    let (mut stream, mut commits) = (Stream::of_client(), Commits::default());
    while read(shared, connection, &connection.client, &mut stream)? {
        let mut passing = Vec::new();
        while let Some(message) = stream.next()? {
            let order = if commits.is_commit(&message) { shared.take_order() } else { None };
            if order == Some(Cut::Before) {
                // What came before it may arrive: an open transaction then dies with its connection.
                server.write_all(&passing)?;
                shared.cut_at_commit(connection);
                return Ok(());
            }
            count(&mut connection.progress(), &message, order.is_some());
            passing.extend_from_slice(&message.bytes);
        }
        server.write_all(&passing)?;
    }
    Ok(())
}

/// Notes a message before it is passed on, so that the answer finds the note.
fn count(progress: &mut Progress, message: &Message, losing: bool) {
    match message.kind {
        Kind::Encryption => progress.wishes += 1,
        Kind::Cancel => {}
        // A simple query is a batch by itself, so a COMMIT of that kind is in the one that it ends.
        Kind::Start | Kind::Tagged(b'Q' | b'S' | b'F') => {
            progress.asked += 1;
            if losing {
                progress.losing = Some(progress.asked);
            }
        }
        Kind::Tagged(_) if losing => progress.losing = Some(progress.asked + 1),
        Kind::Tagged(_) => {}
    }
}

/// Passes on what the server says.
fn from_server(shared: &Shared, connection: &Connection) -> io::Result<()> {
    let server = connection.server.get().expect("it is set before the threads start");
    let mut stream = Stream::of_server();
    while read(shared, connection, server, &mut stream)? {
        let mut passing = Vec::new();
        while let Some(message) = next_answer(connection, &mut stream)? {
            let mut progress = connection.progress();
            if progress.losing == Some(progress.closed + 1) && answers_commit(&message) {
                drop(progress);
                (&connection.client).write_all(&passing)?;
                shared.cut_at_commit(connection);
                return Ok(());
            }
            progress.closed += u64::from(message.kind == Kind::Tagged(b'Z'));
            passing.extend_from_slice(&message.bytes);
        }
        (&connection.client).write_all(&passing)?;
    }
    Ok(())
}

fn next_answer(connection: &Connection, stream: &mut Stream) -> io::Result<Option<Message>> {
    let mut progress = connection.progress();
    if progress.wishes == 0 {
        return stream.next();
    }
    let bare = stream.next_bare();
    progress.wishes -= usize::from(bare.is_some());
    Ok(bare)
}
