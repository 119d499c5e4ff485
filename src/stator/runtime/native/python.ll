; What host programs call that are run from Python: its objects, its lock, its exceptions, and the
; weights that it holds.  Stands behind memory.ll in one text.

declare i32 @aoti_torch_new_tensor_handle(ptr, ptr) nonlazybind
declare i32 @aoti_torch_new_uninitialized_tensor(ptr) nonlazybind
declare void @Py_DecRef(ptr) nonlazybind
declare ptr @PyLong_FromLongLong(i64) nonlazybind
declare ptr @PyObject_CallFunctionObjArgs(ptr, ...) nonlazybind
declare void @PyErr_Fetch(ptr, ptr, ptr) nonlazybind
declare void @PyErr_NormalizeException(ptr, ptr, ptr) nonlazybind
declare void @PyErr_Restore(ptr, ptr, ptr) nonlazybind
declare void @PyErr_Clear() nonlazybind
declare ptr @PyErr_NoMemory() nonlazybind

; --- weights ---

; A number made of 32 words of each of %count pieces of memory, given as addresses and words: a
; write to all of a piece changes it.
define i64 @stator_sample(ptr %pieces, i64 %count) {
entry:
  br label %piece
piece:
  %number = phi i64 [ 0, %entry ], [ %following, %through ]
  %before = phi i64 [ 0, %entry ], [ %mixed, %through ]
  %more = icmp slt i64 %number, %count
  br i1 %more, label %look, label %done
look:
  %at = getelementptr [2 x i64], ptr %pieces, i64 %number
  %data = load ptr, ptr %at
  %words_at = getelementptr i64, ptr %at, i64 1
  %words = load i64, ptr %words_at
  br label %word
word:
  %taken = phi i64 [ 0, %look ], [ %next, %take ]
  %mixed = phi i64 [ %before, %look ], [ %hash, %take ]
  %enough = icmp sge i64 %taken, 32
  %beyond = icmp sge i64 %taken, %words
  %stop = or i1 %enough, %beyond
  br i1 %stop, label %through, label %take
take:
  %wide = icmp sgt i64 %words, 32
  %last = sub i64 %words, 1
  %scaled = mul i64 %taken, %last
  %spread = sdiv i64 %scaled, 31
  %place = select i1 %wide, i64 %spread, i64 %taken
  %from = getelementptr i64, ptr %data, i64 %place
  %value = load i64, ptr %from, align 1
  %both = xor i64 %mixed, %value
  %product = mul i64 %both, -7046029254386353131
  %high = lshr i64 %product, 32
  %hash = xor i64 %product, %high
  %next = add i64 %taken, 1
  br label %word
through:
  %following = add i64 %number, 1
  br label %piece
done:
  ret i64 %before
}

; --- what a program holds ---

; A handle on the tensor inside of a Python object; None stands for a tensor that is undefined.
define i32 @stator_to_handle(ptr %object, i64 %offset, ptr %none, ptr %slot) {
  %undefined = icmp eq ptr %object, %none
  br i1 %undefined, label %without, label %with
without:
  %first = call i32 @aoti_torch_new_uninitialized_tensor(ptr %slot)
  ret i32 %first
with:
  %inside = getelementptr i8, ptr %object, i64 %offset
  %second = call i32 @aoti_torch_new_tensor_handle(ptr %inside, ptr %slot)
  ret i32 %second
}

define void @stator_drop_object(ptr %slot) {
  %object = load ptr, ptr %slot
  store ptr null, ptr %slot
  call void @Py_DecRef(ptr %object)     ; null is allowed
  ret void
}

; Let go of everything that a failed call holds.
define void @stator_drop_all(ptr %objects, i64 %object_count, ptr %handles, i64 %handle_count) {
entry:
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next, %body ]
  %more = icmp slt i64 %i, %object_count
  br i1 %more, label %body, label %done
body:
  %at = getelementptr ptr, ptr %objects, i64 %i
  call void @stator_drop_object(ptr %at)
  %next = add i64 %i, 1
  br label %head
done:
  call void @stator_drop_handles(ptr %handles, i64 %handle_count)
  ret void
}

; Let Python write on the exception which step raised it.
define void @stator_note(ptr %helper, i64 %step) {
  %kind = alloca ptr
  %value = alloca ptr
  %trace = alloca ptr
  call void @PyErr_Fetch(ptr %kind, ptr %value, ptr %trace)
  call void @PyErr_NormalizeException(ptr %kind, ptr %value, ptr %trace)
  %error = load ptr, ptr %value
  %number = call ptr @PyLong_FromLongLong(i64 %step)
  %none = call ptr (ptr, ...) @PyObject_CallFunctionObjArgs(ptr %helper, ptr %error, ptr %number, ptr null)
  call void @PyErr_Clear()              ; a note that cannot be written is not worth an error
  call void @Py_DecRef(ptr %none)
  call void @Py_DecRef(ptr %number)
  %its_kind = load ptr, ptr %kind
  %its_value = load ptr, ptr %value
  %its_trace = load ptr, ptr %trace
  call void @PyErr_Restore(ptr %its_kind, ptr %its_value, ptr %its_trace)
  ret void
}

; --- Python's lock: held at first, let go while kernels run that take their time ---

declare ptr @PyEval_SaveThread() nonlazybind
declare void @PyEval_RestoreThread(ptr) nonlazybind

define void @stator_unlock(ptr %thread) {
  %state = call ptr @PyEval_SaveThread()
  store ptr %state, ptr %thread
  ret void
}

define void @stator_lock(ptr %thread) {
  %state = load ptr, ptr %thread
  %held = icmp eq ptr %state, null
  br i1 %held, label %done, label %wait
wait:
  call void @PyEval_RestoreThread(ptr %state)
  store ptr null, ptr %thread
  br label %done
done:
  ret void
}

; --- calls of Python ---

declare ptr @PyObject_Vectorcall(ptr, ptr, i64, ptr) nonlazybind
declare ptr @{WRAP}(ptr) nonlazybind

; Call %function with arguments that %given describes, one word each: where it is (0: the table,
; 1: the objects, 2: the handles, as a new Python object) and, two bits higher, at which place.
; The last %named of them go by %names.  Python's lock is held.
define ptr @stator_call(ptr %function, ptr %given, i64 %count, i64 %named, ptr %names, ptr %table, ptr %objects, ptr %handles) {
entry:
  %arguments = alloca ptr, i64 %count
  br label %head
head:
  %i = phi i64 [ 0, %entry ], [ %next_i, %put ]
  %more = icmp slt i64 %i, %count
  br i1 %more, label %body, label %call
body:
  %word_at = getelementptr i64, ptr %given, i64 %i
  %word = load i64, ptr %word_at
  %kind = and i64 %word, 3
  %place = lshr i64 %word, 2
  %in_table = icmp eq i64 %kind, 0
  %in_objects = icmp eq i64 %kind, 1
  %low = select i1 %in_objects, ptr %objects, ptr %handles
  %array = select i1 %in_table, ptr %table, ptr %low
  %held_at = getelementptr ptr, ptr %array, i64 %place
  %held = load ptr, ptr %held_at
  %is_handle = icmp eq i64 %kind, 2
  br i1 %is_handle, label %wrap, label %put
wrap:
  %wrapped = call ptr @{WRAP}(ptr %held)
  br label %put
put:
  %argument = phi ptr [ %held, %body ], [ %wrapped, %wrap ]
  %argument_at = getelementptr ptr, ptr %arguments, i64 %i
  store ptr %argument, ptr %argument_at
  %next_i = add i64 %i, 1
  br label %head
call:
  %unnamed = sub i64 %count, %named
  %result = call ptr @PyObject_Vectorcall(ptr %function, ptr %arguments, i64 %unnamed, ptr %names)
  br label %drop_head
drop_head:
  %k = phi i64 [ 0, %call ], [ %next_k, %drop_next ]
  %rest = icmp slt i64 %k, %count
  br i1 %rest, label %drop_body, label %done
drop_body:
  %its_word_at = getelementptr i64, ptr %given, i64 %k
  %its_word = load i64, ptr %its_word_at
  %its_kind = and i64 %its_word, 3
  %own = icmp eq i64 %its_kind, 2
  br i1 %own, label %drop, label %drop_next
drop:
  %own_at = getelementptr ptr, ptr %arguments, i64 %k
  %own_argument = load ptr, ptr %own_at
  call void @Py_DecRef(ptr %own_argument)
  br label %drop_next
drop_next:
  %next_k = add i64 %k, 1
  br label %drop_head
done:
  ret ptr %result
}

; stator_data for a tensor in a slot of objects.  Where it lies otherwise, %words say what of the
; table mends that: a function, the strides and the type that it is called with; its result takes
; the tensor's place.  1: that raised, and Python's lock is held.
define i32 @stator_object_data(ptr %slot, i32 %dtype, i64 %dims, ptr %stride, i32 %written, ptr %data, ptr %table, ptr %words, ptr %thread) {
entry:
  %object = load ptr, ptr %slot
  %tensor = getelementptr i8, ptr %object, i64 {TENSOR}
  %code = call i32 @stator_data(ptr %tensor, i32 %dtype, i64 %dims, ptr %stride, i32 %written, ptr %data)
  %good = icmp eq i32 %code, 0
  br i1 %good, label %done, label %mend
done:
  ret i32 0
mend:
  %state = load ptr, ptr %thread
  %unlocked = icmp ne ptr %state, null
  call void @stator_lock(ptr %thread)
  %arguments = alloca [3 x ptr]
  store ptr %object, ptr %arguments
  %function = call ptr @in_table(ptr %table, ptr %words, i64 0)
  %stride_tuple = call ptr @in_table(ptr %table, ptr %words, i64 1)
  %type = call ptr @in_table(ptr %table, ptr %words, i64 2)
  %second = getelementptr ptr, ptr %arguments, i64 1
  store ptr %stride_tuple, ptr %second
  %third = getelementptr ptr, ptr %arguments, i64 2
  store ptr %type, ptr %third
  %fresh = call ptr @PyObject_Vectorcall(ptr %function, ptr %arguments, i64 3, ptr null)
  %raised = icmp eq ptr %fresh, null
  br i1 %raised, label %fail, label %replace
fail:
  ret i32 1
replace:
  store ptr %fresh, ptr %slot
  call void @Py_DecRef(ptr %object)
  %inside = getelementptr i8, ptr %fresh, i64 {TENSOR}
  call i32 @torch_get_const_data_ptr(ptr %inside, ptr %data)
  br i1 %unlocked, label %unlock, label %done
unlock:
  call void @stator_unlock(ptr %thread)
  br label %done
}

define internal ptr @in_table(ptr %table, ptr %words, i64 %number) {
  %word_at = getelementptr i64, ptr %words, i64 %number
  %word = load i64, ptr %word_at
  %held_at = getelementptr ptr, ptr %table, i64 %word
  %held = load ptr, ptr %held_at
  ret ptr %held
}
